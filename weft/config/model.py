"""The geometry of a model, in one vocabulary for every architecture that Weft supports.

Job: the frozen ``ModelConfig`` that layers, caches, loaders and planners read. Owns: field names and derived sizes.
Does not know: checkpoints (``config/checkpoint.py`` makes it from ``config.json``), devices, tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, cast

from weft.config.indexed_attention import PLACES, PLACES_LAYER, IndexedAttentionConfig
from weft.config.layer_spec import CacheDtypes, CacheTensor, LayerSpec, MixerConfig
from weft.config.moe import MoeConfig
from weft.config.quantization import QuantizationConfig
from weft.config.residual_streams import StreamsConfig
from weft.config.vision import VisionConfig
from weft.errors import ConfigError

MTP_LAYER, MTP_LAYER_TYPE = "mtp.layers.0", "full_attention"
"""Name and type of the decoder layer in the multi-token-prediction head."""


ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu2")
"""Activations of MLPs, by the names of transformers. ``relu2`` has no gate; the others gate a second projection."""


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Constants by which some families scale parts of the model.

    Attributes:
        embedding: factor of the token embeddings.
        residual: factor of each mixer's and MLP's contribution to the residual stream.
        gate, down: factors of the dense MLP's gate (before the activation) and of its output.
        swiglu_limit: upper bound of the dense MLP's gate, and bound of the magnitude of what it multiplies; None: no
            bounds.
        learned_mlp: dense MLPs, and the weights of each token's experts, have a learned factor (Inkling).
        logits_cap: logits x become ``cap * tanh(x / cap)``; None: they stay as they are.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    gate: float = 1.0
    down: float = 1.0
    swiglu_limit: float | None = None
    logits_cap: float | None = None
    learned_mlp: bool = False


@dataclass(frozen=True, slots=True)
class ResidualWeights:
    """Weights of the input and the output of each half of a block in the residual stream (MiniMax)."""

    mixer_input: float
    mixer_output: float
    mlp_input: float
    mlp_output: float


class Mixers(Mapping[str, Mapping[str, MixerConfig]]):
    """A read-only map: layer type -> name of the module in the decoder layer -> geometry of that token mixer.

    It is a class because each geometry travels between processes with the name of its class (``transport.py``).
    """

    def __init__(self, geometries: Mapping[str, Mapping[str, MixerConfig]]) -> None:
        self._geometries = geometries

    def __getitem__(self, layer_type: str) -> Mapping[str, MixerConfig]:
        return self._geometries[layer_type]

    def __iter__(self) -> Iterator[str]:
        return iter(self._geometries)

    def __len__(self) -> int:
        return len(self._geometries)

    def as_dicts(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The numbers as plain values."""
        return {kind: {name: asdict(cast(Any, g)) for name, g in modules.items()} for kind, modules in self.items()}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The geometry of one model. Sizes are those of the whole model, before tensor-parallel sharding.

    Attributes:
        architecture: the class name in the checkpoint, for example ``Qwen3NextForCausalLM``.
        unpadded_vocab_size: ids below it can be sampled; None: all ids.
        wrapper: the class name in the checkpoint if it holds this model as its text part (``config/wrappers.py``).
        layer_types: one entry per layer, as the checkpoint names them (``full_attention``, ``linear_attention``, ...).
        mixers: the token mixers of every layer type that occurs. A layer with several mixers side by side has several
            modules.
        layers_without_mlp: layers that have token mixers alone. (A layer type without mixers has an MLP alone.)
        activation: the activation of dense MLPs and experts, one of ``ACTIVATIONS``. Experts have no GELU.
        zero_centered_norm: RMSNorm scales by ``1 + weight`` (all norms but the gated one).
        norm_placement: layer type -> position of the norms in its block. ``pre`` (the default): before mixer and MLP.
            ``post``: after them. ``sandwich``: on both sides. ``stream``: before them, and the residual stream
            continues from the norm's output. ``streams``: before them, with the residual streams of ``streams``.
            ``shared_block``: before mixers whose norm also reads the output of a shared block. ``scaled``: before mixer
            and MLP, with a residual stream in float32 that learned vectors scale. ``convolved``:
            before mixer and MLP, and a short convolution follows each half. ``blocks``: the same, where each norm
            reads the stream of now and of before earlier blocks of layers.
        streams: the residual streams; None: there is one, to which blocks add.
        residual_weights: layer type -> weights of a block with norms in the stream.
        dtype: the checkpoint's own dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        state_dtype: dtype of the recurrent state if the checkpoint names one (``mamba_ssm_dtype``), else None.
        quantization: the storage of the linear layers' weights; None: in ``dtype``.
        mtp_layers: number of layers in the multi-token-prediction head of the architecture's checkpoints.
        mtp_chain: types of the layers of a head with a layer for each further draft; empty: one layer makes all drafts.
        mtp_refused: why Weft does not run that head; empty: it does.
        runs_mtp: whether the model runs that head, which then has weights, has a cache, and drafts.
        mtp_depth: number of layers of a chain that run, the first ones.
        vision: the vision tower of the checkpoint.
        runs_vision: whether the model runs that tower, so that prompts may hold images.
        eos_token_ids: ids from ``config.json``. Ids from ``generation_config.json`` have precedence.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    mixers: Mixers
    tie_word_embeddings: bool = False
    mlp_bias: bool = False
    layers_without_mlp: frozenset[int] = frozenset()
    activation: str = "silu"
    multipliers: Multipliers = Multipliers()
    zero_centered_norm: bool = False
    norm_placement: dict[str, str] = field(default_factory=dict)
    streams: StreamsConfig | None = None
    residual_weights: dict[str, ResidualWeights] = field(default_factory=dict)
    moe: MoeConfig | None = None
    dtype: str = "float32"
    state_dtype: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: QuantizationConfig | None = None
    mtp_layers: int = 0
    mtp_chain: tuple[str, ...] = ()
    mtp_refused: str = ""
    runs_mtp: bool = False
    mtp_depth: int = 0
    vision: VisionConfig | None = None
    runs_vision: bool = False
    wrapper: str | None = None
    unpadded_vocab_size: int | None = None

    @property
    def residual_norm_eps(self) -> float:
        """The epsilon of the residual stream's norms. With a residual multiplier m the stream is stored divided by m,
        so that contributions need no factor. ``norm(x / m)`` with ``eps / m**2`` equals ``norm(x)`` with eps."""
        return self.rms_norm_eps / self.multipliers.residual**2

    @property
    def num_sparse_mlps(self) -> int:
        """Number of layers with experts, including that of a multi-token-prediction head."""
        if self.moe is None:
            return 0
        return len(self.moe.sparse_layers) + (self.runs_mtp and not self.mtp_chain)

    @property
    def num_dense_mlps(self) -> int:
        """Number of layers with a dense MLP, including that of a multi-token-prediction head."""
        num_layers = self.num_hidden_layers + len(self.head_layers)
        return num_layers - self.num_sparse_mlps - len(self.layers_without_mlp)

    @property
    def mlp_matrices(self) -> int:
        """Number of projections in a dense MLP or an expert: gate, up and down, or up and down."""
        return 2 if self.activation == "relu2" else 3

    @property
    def expert_weights(self) -> int:
        """Number of weights of one routed expert; 0 without experts."""
        if self.moe is None:
            return 0
        return self.mlp_matrices * (self.moe.latent_size or self.hidden_size) * self.moe.intermediate_size

    @property
    def shared_moe_weights(self) -> int:
        """Number of weights that every token uses in a layer with experts, without the router's."""
        if self.moe is None:
            return 0
        shared = self.mlp_matrices * (self.moe.shared_expert_intermediate_size or 0)
        return self.hidden_size * (shared + 2 * (self.moe.latent_size or 0))

    @property
    def is_hybrid(self) -> bool:
        """Whether any layer keeps a recurrent state."""
        mixers = (mixer for modules in self.mixers.values() for mixer in modules.values())
        return any(mixer.layer_spec(self.hidden_size, CacheDtypes()).states for mixer in mixers)

    @property
    def verifies(self) -> bool:
        """Whether every layer with states can verify drafts of many sequences at once (``LayerSpec.verifies``)."""
        return all(spec.verifies for spec in self.layer_specs(CacheDtypes()).values() if spec.states)

    def layer_specs(self, dtypes: CacheDtypes) -> dict[str, LayerSpec]:
        """The specs of all layers in model order, by name in the layer table (``model.layers.3.self_attn``)."""
        kinds = {
            kind: {module: mixer.layer_spec(self.hidden_size, dtypes) for module, mixer in modules.items()}
            for kind, modules in self.mixers.items()
        }
        layers = {layer_name(index): kind for index, kind in enumerate(self.layer_types)}
        layers |= self.head_layers
        specs = {f"{layer}.{module}": spec for layer, kind in layers.items() for module, spec in kinds[kind].items()}
        delay = LayerSpec(states=(CacheTensor("conv", (self.hidden_size, 1), dtypes.model),))
        specs |= dict.fromkeys((mtp_delay_name(index) for index in range(1, self.mtp_depth)), delay)
        mixers = (mixer for modules in self.mixers.values() for mixer in modules.values())
        stores_places = self.runs_vision and any(isinstance(mixer, IndexedAttentionConfig) for mixer in mixers)
        return specs | {PLACES_LAYER: PLACES} if stores_places else specs

    def is_sparse(self, index: int) -> bool:
        """Whether a decoder layer has experts instead of a dense MLP."""
        return self.moe is not None and index in self.moe.sparse_layers

    @property
    def head_layers(self) -> dict[str, str]:
        """The decoder layers of the multi-token-prediction head that runs: name -> layer type."""
        if not self.runs_mtp:
            return {}
        if not self.mtp_chain:
            return {MTP_LAYER: self.mtp_layer_type}
        return {mtp_block_name(index): kind for index, kind in enumerate(self.mtp_chain[: self.mtp_depth])}

    @property
    def mtp_layer_type(self) -> str:
        """The type of the layer of the multi-token-prediction head: attention of the model's kind."""
        return MTP_LAYER_TYPE if MTP_LAYER_TYPE in self.mixers else "indexed_attention"

    @property
    def returns_streams(self) -> bool:
        """Whether the model returns residual streams, for a head that drafts, in place of one hidden state."""
        return self.runs_mtp and self.streams is not None and self.streams.form == "gated"

    @property
    def output_size(self) -> int:
        """How many numbers the model returns for a token."""
        return self.hidden_size * (self.streams.count if self.streams is not None and self.returns_streams else 1)

    def with_mtp(self, num_drafts: int | None = None) -> Self:
        """Return the model with its multi-token-prediction head.

        Args:
            num_drafts: most drafts of a step. A chain runs as many layers; None: all.

        Raises:
            ConfigError: the model has no head, one that Weft does not run, or too few layers for the drafts.
        """
        if self.mtp_chain:
            return self._with_chain(len(self.mtp_chain) if num_drafts is None else num_drafts)
        if self.mtp_layers != 1 or self.mtp_layer_type not in self.mixers:
            raise ConfigError(
                f"speculative_config: method 'mtp' needs a multi-token-prediction head of one {MTP_LAYER_TYPE} layer; "
                f"this {self.architecture} has {self.mtp_layers or 'no'} layers of such a head. Choose method 'ngram', "
                "or a checkpoint of Qwen3-Next, Qwen3.5, Qwen4-Exp, GLM-5.3, Ling 3.0 or Inkling with the tensors of "
                "its head"
            )
        return replace(self, runs_mtp=True)

    def _with_chain(self, num_drafts: int) -> Self:
        missing = sorted({*self.mtp_chain[:num_drafts]} - {*self.mixers})
        why = self.mtp_refused or (f"no layer of the model has the head's type {missing[0]!r}" if missing else "")
        if why:
            raise ConfigError(
                f"speculative_config: method 'mtp' does not run the head of this checkpoint: {why}. "
                "Choose method 'ngram'"
            )
        if num_drafts > len(self.mtp_chain):
            raise ConfigError(
                f"speculative_config: num_speculative_tokens={num_drafts}, but the head of this {self.architecture} "
                f"has {len(self.mtp_chain)} layers, and each makes one draft; give at most {len(self.mtp_chain)}"
            )
        return replace(self, runs_mtp=True, mtp_depth=num_drafts)

    def without_mtp(self) -> Self:
        """Return the model without its multi-token-prediction head."""
        return replace(self, runs_mtp=False, mtp_depth=0)

    def with_vision(self) -> Self:
        """Return the model with its vision tower.

        Raises:
            ConfigError: tower and decoder do not fit together.
        """
        vision = self.vision
        assert vision is not None, "the checkpoint has a vision tower"
        if vision.out_hidden_size != self.hidden_size:
            raise ConfigError(
                f"vision_config: out_hidden_size={vision.out_hidden_size} is not the decoder's "
                f"hidden_size={self.hidden_size}; set language_model_only=True to run the text model alone"
            )
        if len(vision.deepstack_indexes) > self.num_hidden_layers:
            raise ConfigError(
                f"vision_config: deepstack_visual_indexes={list(vision.deepstack_indexes)} are more than the decoder's "
                f"{self.num_hidden_layers} layers; set language_model_only=True to run the text model alone"
            )
        return replace(self, runs_vision=True)


def mtp_block_name(index: int) -> str:
    """The name of the decoder layer in a layer of a chained head."""
    return f"mtp.layers.{index}.transformer_block"


def mtp_delay_name(index: int) -> str:
    """The name of the state in which a layer of a chained head keeps the last output of the layer before it."""
    return f"mtp.layers.{index}.delay"


def layer_name(index: int) -> str:
    """The name of a decoder layer, which is that of its module. Token mixers append their own names."""
    return f"model.layers.{index}"
