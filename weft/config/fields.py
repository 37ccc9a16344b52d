"""All settings of the engine: one frozen dataclass, and the accepted values of each field.

Job: ``EngineConfig``, the resolved settings that the rest of the engine reads, with a reason for each automatic choice.
Owns: field names, defaults, ranges, choices, help texts.
Does not know: flags (``aliases.py``, the command line), how automatic values are found (``resolution.py``), torch.

Build one with ``weft.config.resolve``; the constructor checks nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from weft.config.generation import GenerationDefaults
from weft.config.graph_modes import CudaGraphMode
from weft.config.media_limits import MediaLimits, parse_media_limits
from weft.config.model import ModelConfig
from weft.config.speculation import SpeculativeConfig, parse_speculative_config

Kind = Literal["int", "float", "bool", "text", "path", "ints", "texts", "json"]


@dataclass(frozen=True, slots=True)
class Option:
    """The values that one field accepts from the user.

    Attributes:
        default: the value when the user gives none. None usually means an automatic choice (see the help text).
        kind: type of the value; ``ints`` and ``texts`` are non-empty lists, ``json`` is what ``parse`` reads.
        low, high, above: inclusive limits, and an exclusive lower limit.
        choices: allowed texts.
        synonyms: other names of choices, in the words of other engines.
        parse: converts a mapping or its JSON text to the value. Raises ConfigError.
    """

    help: str
    kind: Kind
    default: Any
    low: float | None = None
    high: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = field(default_factory=dict)
    parse: Callable[[Any], Any] | None = None


def _option(kind: Kind, default: Any, help: str, **limits: Any) -> Any:
    return field(default=default, metadata={"option": Option(help=help, kind=kind, default=default, **limits)})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The resolved settings of one engine. No field still means "automatic".

    ``None`` means "off" or "not set", as the field's help text says. Users cannot set ``model_path``,
    ``tokenizer_path``, ``model_config`` and ``generation``. ``reasons`` holds a sentence for each automatic choice.
    """

    # model
    model: str = _option("text", None, "folder or hub id of the checkpoint; default: the bundled weft-mini")
    tokenizer: str = _option("text", None, "folder or hub id of the tokenizer; default: the model's")
    served_model_name: str = _option("text", None, "name of the model in answers; default: --model as it was given")
    load_format: str = _option(
        "text",
        "auto",
        "auto: safetensors; dummy: random weights, only config.json is needed",
        choices=("auto", "dummy"),
    )
    skip_tokenizer_init: bool = _option("bool", False, "load no tokenizer: token ids in, token ids out")
    dtype: str = _option(
        "text", "auto", "computing dtype; auto: the checkpoint's on a GPU, float32 on the CPU",
        choices=("auto", "float32", "float16", "bfloat16"),
    )  # fmt: skip
    quantization: str | None = _option(
        "text", None, "fp8 or int4: quantise an unquantised checkpoint while it loads; default: as the checkpoint is",
        choices=("fp8", "int4"),
    )  # fmt: skip
    max_model_len: int = _option("int", None, "longest sequence in tokens; default: the checkpoint's", low=1)
    seed: int = _option("int", 0, "seed of requests without one, and of dummy weights", low=0, high=2**63 - 1)
    # device
    device: str = _option("text", "auto", "auto: a CUDA GPU if there is one", choices=("auto", "cpu", "cuda"))
    backend: str = _option(
        "text", "auto", "implementation of the operations; auto: Triton kernels on a GPU, torch on the CPU",
        choices=("auto", "torch", "triton"),
    )  # fmt: skip
    deterministic: bool = _option(
        "bool", False, "a request gets the same tokens and log probabilities, bit for bit, whatever other requests, "
        "the prefix cache, steps and graphs do",
    )  # fmt: skip
    tensor_parallel_size: int = _option("int", 1, "GPUs (or processes, on the CPU) that share one model", low=1)
    data_parallel_size: int = _option(
        "int", 1, "replicas of the model behind one server, each with GPUs of its own (weft serve)", low=1
    )
    enable_expert_parallel: bool = _option(
        "bool", False, "split a mixture of experts by whole experts, not by their width"
    )
    disable_custom_all_reduce: bool = _option(
        "bool", False, "leave every all-reduce to NCCL, also where Weft's kernel (fused with the norm) is faster"
    )
    data_parallel_backend: Literal["mp", "ray"] = _option(
        "text", None, "where replicas run: mp (processes of this machine) or ray (actors on the machines of a Ray "
        "cluster; weft serve); default: mp, or ray with distributed_executor_backend=ray", choices=("mp", "ray"),
    )  # fmt: skip
    distributed_executor_backend: Literal["uni", "mp", "external_launcher", "ray"] = _option(
        "text", None, "who runs the ranks: uni (this process, one rank), mp (a process for each further rank), "
        "external_launcher (torchrun has started them) or ray (Ray finds a machine with room for all of them; weft "
        "serve); default: what fits", choices=("uni", "mp", "external_launcher", "ray"),
    )  # fmt: skip
    # memory
    gpu_memory_utilization: float = _option(
        "float", 0.9, "share of GPU memory for weights, activations and caches", above=0.0, high=1.0
    )
    cpu_cache_gib: float = _option("float", 1.0, "memory of KV pages and states on the CPU, in GiB", above=0.0)
    page_size: int = _option("int", 16, "tokens per KV page", low=1, high=1024)
    num_kv_pages: int | None = _option(
        "int", None, "KV pages, the reserved one included; default: what memory allows", low=2
    )
    num_state_slots: int | None = _option(
        "int", None, "recurrent-state slots, the reserved one included; default: what memory allows", low=2
    )
    kv_cache_dtype: Literal["auto", "fp8"] = _option(
        "text", "auto", "keys and values in pages. auto: computing dtype; fp8: e4m3, by the checkpoint's scales if any",
        choices=("auto", "fp8"), synonyms={"fp8_e4m3": "fp8"},
    )  # fmt: skip
    mamba_ssm_dtype: str = _option(
        "text", "auto", "dtype of the recurrent state; auto: the checkpoint's, else float32",
        choices=("auto", "float32", "bfloat16"),
    )  # fmt: skip
    # scheduling
    max_num_seqs: int = _option(
        "int", None, "most requests that run at a time; default: 256 on a GPU, 128 on the CPU", low=1, high=4096
    )
    max_logprobs: int = _option(
        "int", 20, "most log probabilities per token that a request may ask for; -1: the vocabulary", low=-1
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = _option(
        "text", "raw_logprobs", "log probabilities of sampled tokens: raw_logprobs (the model's own) or "
        "processed_logprobs (after penalties, temperature and filters)",
        choices=("raw_logprobs", "processed_logprobs"),
    )  # fmt: skip
    max_num_batched_tokens: int = _option(
        "int", None, "token budget of one step; longer prompts run in chunks; default: 8192 on a GPU, 2048 on the CPU",
        low=1, high=65_535,  # some kernels have a program for each token along the second dimension of a CUDA grid
    )  # fmt: skip
    schedule_policy: Literal["fcfs", "priority", "lpm"] = _option(
        "text", "fcfs", "which waiting request is admitted first: fcfs, priority, or lpm (longest cached prefix)",
        choices=("fcfs", "priority", "lpm"),
    )  # fmt: skip
    enable_overlap: bool = _option(
        "bool", None, "launch a step before the last one's tokens are read; default: on a GPU"
    )
    speculative_config: SpeculativeConfig | None = _option(
        "json", None, "draft tokens and verify them in one step, for example "
        """'{"method": "mtp", "num_speculative_tokens": 2}'; default: no drafts""", parse=parse_speculative_config,
    )  # fmt: skip
    # images
    language_model_only: bool = _option(
        "bool", None, "leave out the checkpoint's vision tower and refuse images; default: where it has none, or "
        "Pillow is missing",
    )  # fmt: skip
    limit_mm_per_prompt: MediaLimits = _option(
        "json", MediaLimits(), """most images and videos of a prompt, for example '{"image": 4, "video": 0}'; """
        "default: as many as fit the context", parse=parse_media_limits,
    )  # fmt: skip
    max_num_encoder_input_tokens: int | None = _option(
        "int", None, "most tokens of images that the vision tower encodes in a step, and of one image or video; "
        "default: 16384 or the context", low=1,
    )  # fmt: skip
    encoder_cache_size: int | None = _option(
        "int", None, "tokens of images whose embeddings are kept; default: 32768", low=1
    )
    encoder_cuda_graph_patches: tuple[int, ...] = _option(
        "ints", None, "numbers of patches for which the vision tower is captured; 0: none; default: 256 512 1024 1536 "
        "2048 where graphs run", low=0,
    )  # fmt: skip
    mm_processor_cache_gb: float = _option(
        "float", 1.0, "GiB of processed images that a process which reads requests keeps, for later turns", low=0.0
    )
    allowed_local_media_path: Path | None = _option(
        "path", None, "messages may name image files under this folder (file:///…); default: none"
    )
    allowed_media_domains: tuple[str, ...] | None = _option(
        "texts", None, "messages may name images at these hosts (NAME or NAME:PORT); default: nothing is fetched"
    )
    # prefix cache
    enable_prefix_caching: bool = _option("bool", True, "reuse KV and recurrent states of shared prefixes")
    state_checkpoint_policy: Literal["exact", "aligned", "finish_only"] = _option(
        "text", "exact", "where recurrent states are kept for reuse", choices=("exact", "aligned", "finish_only"),
        synonyms={"extra_buffer": "aligned", "no_buffer": "finish_only"},
    )  # fmt: skip
    eviction_policy: Literal["flops", "lru"] = _option(
        "text", "flops", "what is evicted first: flops (old entries that save few FLOPs per byte) or lru",
        choices=("flops", "lru"),
    )  # fmt: skip
    kv_offloading_size: float | None = _option(
        "float", None, "GiB of host memory, over all ranks, for KV and states that leave the device; default: none",
        low=0.0,
    )  # fmt: skip
    kv_offloading_policy: Literal["write_back", "write_through_selective"] = _option(
        "text", "write_back", "when entries are copied to host memory: write_back (when they are evicted) or "
        "write_through_selective (once a request has reused them)", choices=("write_back", "write_through_selective"),
    )  # fmt: skip
    kv_offloading_dir: Path | None = _option(
        "path", None, "folder for KV and states of host memory, which the next start finds again; default: none"
    )
    kv_offloading_disk_size: float | None = _option(
        "float", None, "GiB of files in kv_offloading_dir; default: four times kv_offloading_size", above=0.0
    )
    kv_offloading_disk_hours: float = _option(
        "float", 168.0, "hours after which a file that nobody used is removed", above=0.0
    )
    # graphs
    enforce_eager: bool = _option("bool", False, "run without CUDA graphs")
    cuda_graph_mode: str = _option(
        "text", None, "which batches run as graphs; default: FULL on a GPU, NONE on the CPU (where any "
        "other mode replays recorded operations, to test what a graph would do)",
        choices=tuple(str(mode) for mode in CudaGraphMode if mode is not CudaGraphMode.TUNED),
    )  # fmt: skip
    graph_profile: str | None = _option(
        "text", None, "file of `weft tune` that says which batches run as graphs, or none; default: the one stored for "
        "this device, model and version, if there is one and no other setting names the mode",
    )  # fmt: skip
    cuda_graph_bs: tuple[int, ...] | None = _option("ints", None, "decode batch sizes to capture", low=1)
    cuda_graph_max_bs: int | None = _option("int", None, "largest decode batch to capture; default: 1024", low=1)
    enable_cudagraph_gc: bool = _option("bool", False, "leave the garbage collector on during capture")
    enable_piecewise_cuda_graph: bool = _option(
        "bool", False, "run prefill in captured pieces between the split operations"
    )
    piecewise_cuda_graph_tokens: tuple[int, ...] | None = _option(
        "ints", None, "token counts to capture for prefill and mixed batches", low=1
    )
    piecewise_cuda_graph_max_tokens: int | None = _option(
        "int", None, "largest token count to capture for prefill and mixed batches; default: that of a step, at "
        "most 4096, on the CPU 512",
        low=1,
    )  # fmt: skip
    piecewise_cuda_graph_compiler: str = _option(
        "text", "capture", "where pieces come from: capture (of the running model), eager (of a traced model) or "
        "inductor (compiled once for all sizes, and kept on disk)", choices=("capture", "eager", "inductor"),
    )  # fmt: skip
    splitting_ops: tuple[str, ...] | None = _option(
        "texts",
        None,
        "operations that separate the pieces, by name, and functions, methods and modules by their paths; a first name "
        "with + extends the default list instead of replacing it; default: attention",
    )
    enable_torch_compile: bool = _option("bool", False, "compile the model inside decode graphs, with Inductor")
    torch_compile_max_bs: int | None = _option("int", None, "largest decode batch to compile for; default: 32", low=1)
    enable_torch_compile_debug_mode: bool = _option(
        "bool", False, "check on every replay that nothing that the graph reads has moved"
    )
    # rollouts
    enable_sleep_mode: bool = _option(
        "bool", False, "make weights and caches so that sleep() can give their memory back; on a GPU this needs "
        "torch_memory_saver",
    )  # fmt: skip
    # looking inside
    profile_dir: Path | None = _option("path", None, "write a torch profiler trace into this folder")
    # found, not given
    model_path: Path
    tokenizer_path: Path
    model_config: ModelConfig
    generation: GenerationDefaults
    tokenizer_eos_token_id: int | None
    reasons: Mapping[str, str]

    @property
    def keeps_states(self) -> bool:
        """Whether recurrent states are cached, so that turn boundaries of conversations matter."""
        return self.enable_prefix_caching and self.model_config.is_hybrid

    @property
    def num_drafts(self) -> int:
        """Upper bound on tokens drafted per step and request; 0 without speculative decoding."""
        return self.speculative_config.num_speculative_tokens if self.speculative_config is not None else 0

    @property
    def verifies(self) -> bool:
        """Whether steps of sequences with equally many drafts run as verifications. Pieces, and layers without an
        operation for verifications, otherwise run drafts as short prefills. With ``deterministic`` such layers decode
        drafts one by one."""
        return self.deterministic or (self.cuda_graph_mode != "PIECEWISE" and self.model_config.verifies)

    @property
    def drafts_on_device(self) -> bool:
        """Whether a step that verifies drafts can be launched before the previous step is done. All steps must run
        alike for that."""
        return self.speculative_config is not None and self.enable_overlap and self.verifies

    def num_drafts_at(self, num_seqs: int) -> int:
        """Tokens drafted for each of ``num_seqs`` requests that decode together."""
        return self.speculative_config.drafts_at(num_seqs) if self.speculative_config is not None else 0

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a text, as far as the model can sample them. They come from ``generation_config.json``,
        else ``config.json``; the tokenizer's own EOS, which ends a turn of its chat template, is added."""
        named = dict.fromkeys(self.generation.eos_token_ids or self.model_config.eos_token_ids)
        if self.tokenizer_eos_token_id is not None:
            named[self.tokenizer_eos_token_id] = None
        return tuple(token for token in named if token < self.model_config.vocab_size)


OPTIONS: Mapping[str, Option] = {f.name: f.metadata["option"] for f in fields(EngineConfig) if "option" in f.metadata}
"""All settings of the user, in the order of the fields."""
