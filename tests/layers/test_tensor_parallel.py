"""Sharded layers: two (or four) ranks, simulated one after the other in one process, equal the unsharded layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import Harness
from tests.models.mtp_reference import make_mtp_checkpoint
from tests.tiny import make_checkpoint
from tests.whole import RUNS_LONG, unless_long
from weft.errors import ConfigError
from weft.forward_context import forward_context
from weft.layers.norm import OutputRMSNorm, ResidualRMSNorm, ResidualSum
from weft.layers.residual_conv import OutputConv

LENGTHS = (1, 65, 7)
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 12}
NEMOTRON = {"mamba_num_heads": 8, "n_groups": 4}
ZAMBA2 = {"n_mamba_heads": 8, "mamba_ngroups": 4}
LINEAR = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}


class Group:
    """Simulated ranks. A gather returns the inputs of the ranks that have run so far: the last rank gets all.

    Args:
        sums: the results of the sums inside of a layer, in order. None if the layer has no sums.
    """

    def __init__(self, size: int, sums: list[Tensor] | None = None) -> None:
        self.size, self.sums = size, sums
        self.gathered: list[Tensor] = []
        self.summed: list[list[Tensor]] = []

    def rank(self, rank: int) -> Rank:
        return Rank(self, rank)


class Rank:
    """One simulated rank; ranks run in order."""

    def __init__(self, group: Group, rank: int) -> None:
        self._group, self.rank, self.size = group, rank, group.size
        group.summed.append([])

    def all_reduce(self, x: Tensor) -> Tensor:
        sums, own = self._group.sums, self._group.summed[-1]
        assert sums is not None, "a layer leaves its part of the sum; the norm after it sums over the ranks"
        own.append(x)
        return sums[len(own) - 1] if sums else x.clone()

    def all_gather(self, x: Tensor) -> Tensor:
        self._group.gathered.append(x)
        return torch.cat(self._group.gathered, dim=-1)

    def peer_memory(self, num_bytes: int) -> Tensor | None:
        return None

    def least(self, value: int) -> int:
        return value

    is_alone = False

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()


Run = Callable[[Harness], Tensor]


def run_sharded(folder: Path, size: int, run: Run, *, sums: list[Tensor] | None = None, **options: bool) -> Tensor:
    """Return the sum of the ranks' results, or the last rank's result if ranks gather. ``Group`` takes ``sums``, and
    ``Harness`` takes ``options``."""
    group = Group(size, sums)
    parts = [run(Harness(folder, tp=group.rank(rank), **options)) for rank in range(size)]
    if sums is not None:  # each sum may depend on the sums before it
        found = [torch.stack(terms).sum(0) for terms in zip(*group.summed, strict=True)]
        assert found, "there are sums inside of the layer"
        if len(found) != len(sums) or not all(map(torch.equal, found, sums)):
            return run_sharded(folder, size, run, sums=found, **options)
    return parts[-1] if group.gathered else torch.stack(parts).sum(0)


def run_layer(name: str) -> Run:
    """Run one module of the model on random hidden states: a prefill of three sequences, with padding."""

    def run(harness: Harness) -> Tensor:
        layer = harness.model.get_submodule(name)
        sequences = [harness.sequence(list(range(n + 1))) for n in LENGTHS]
        x = torch.randn(sum(LENGTHS) + 2, harness.config.hidden_size, generator=torch.Generator().manual_seed(0))
        with forward_context(
            harness.context_for([(s, n) for s, n in zip(sequences, LENGTHS, strict=True)], pad_tokens=2)
        ):
            return layer(x if (count := getattr(layer, "num_inputs", 0)) == 0 else x.expand(count, -1, -1))

    return run


@pytest.mark.parametrize("size", unless_long([2], [2, 4]))
@pytest.mark.parametrize(
    ("arch", "name", "overrides"),
    [
        ("LlamaForCausalLM", "model.layers.0.self_attn", {"num_key_value_heads": 4, "attention_bias": True}),
        ("Qwen3ForCausalLM", "model.layers.0.self_attn", {"num_key_value_heads": 2}),
        ("Qwen3ForCausalLM", "model.layers.0.self_attn", {"num_key_value_heads": 1}),
        ("LlamaForCausalLM", "model.layers.0.mlp", {"mlp_bias": True}),
        ("Qwen2ForCausalLM", "model.layers.0.self_attn", {"num_key_value_heads": 2}),
        ("Lfm2ForCausalLM", "model.layers.0.conv", {"conv_bias": True}),
        ("BambaForCausalLM", "model.layers.0.mamba", {"mamba_proj_bias": True, "mamba_n_groups": 4} | MAMBA),
        ("FalconH1ForCausalLM", "model.layers.0.mamba", {"projectors_bias": True, "mamba_n_groups": 4} | MAMBA),
        ("Zamba2ForCausalLM", "model.layers.3.mamba", ZAMBA2),
        ("ZambaForCausalLM", "model.layers.3.mamba", {"n_mamba_heads": 4, "mamba_proj_bias": True}),
        ("NemotronHForCausalLM", "model.layers.3.mlp", NEMOTRON),
        ("NemotronHForCausalLM", "model.layers.1.mlp", NEMOTRON | {"mlp_bias": True}),
        ("NemotronHForCausalLM", "model.layers.3.mlp", NEMOTRON | {"moe_latent_size": 20}),
        ("GraniteMoeHybridForCausalLM", "model.layers.0.mlp", MAMBA | {"mamba_n_groups": 4}),
        ("Qwen3MoeForCausalLM", "model.layers.0.mlp", {}),
        ("Lfm2MoeForCausalLM", "model.layers.2.mlp", {}),
        ("GptOssForCausalLM", "model.layers.1.self_attn", {}),
        ("GptOssForCausalLM", "model.layers.1.mlp", {}),
        ("Lfm3ForCausalLM", "model.layers.1.self_attn", {}),
        ("Lfm3ForCausalLM", "model.layers.3.self_attn", {}),
        ("ZayaForCausalLM", "model.layers.0.self_attn", {"num_key_value_heads": 4, "attention_bias": True}),
        ("ZayaForCausalLM", "model.layers.1.self_attn", {"num_attention_heads": 8, "num_key_value_heads": 4}),
        ("InklingForCausalLM", "model.layers.0.self_attn", {}),
        ("InklingForCausalLM", "model.layers.0.self_attn", {"swa_num_key_value_heads": 1}),
        ("InklingForCausalLM", "model.layers.1.self_attn", {}),
        ("InklingForCausalLM", "model.layers.0.mlp", {}),
        ("InklingForCausalLM", "model.layers.1.mlp", {}),
        ("Inkling2ForCausalLM", "model.layers.0.self_attn", {}),
        ("Inkling2ForCausalLM", "model.layers.0.self_attn", {"swa_num_key_value_heads": 1}),
        ("Inkling2ForCausalLM", "model.layers.1.self_attn", {}),
        ("Inkling2ForCausalLM", "model.layers.1.mlp", {}),
        ("RecurrentGemmaForCausalLM", "model.layers.0.recurrent", {}),
        ("RecurrentGemmaForCausalLM", "model.layers.1.self_attn", {}),
        ("KimiLinearForCausalLM", "model.layers.0.self_attn", {}),
        ("KimiLinearForCausalLM", "model.layers.2.self_attn", {}),
        ("KimiLinearForCausalLM", "model.layers.2.self_attn", {"q_lora_rank": 18}),
        ("KimiLinearForCausalLM", "model.layers.2.mlp", {}),
        ("Glm5NextForConditionalGeneration", "model.layers.0.self_attn", {}),
        ("Glm5NextForConditionalGeneration", "model.layers.3.self_attn", {}),
        ("Glm5NextForConditionalGeneration", "model.layers.0.mlp", {}),
        ("Glm5NextForConditionalGeneration", "model.layers.3.mlp", {}),
        ("Qwen4ExpForCausalLM", "model.layers.1.linear_attn", LINEAR),
        ("Qwen4ExpForCausalLM", "model.layers.2.self_attn", LINEAR | {"num_key_value_heads": 1}),
        ("Qwen4ExpForCausalLM", "model.layers.2.mlp", LINEAR),
        ("BailingHybridForCausalLM", "model.layers.0.self_attn", {}),
        ("BailingHybridForCausalLM", "model.layers.2.self_attn", {}),
        (
            "Qwen3ForCausalLM",
            "model.layers.1.self_attn",
            {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 5},
        ),
        ("Qwen3NextForCausalLM", "model.layers.3.self_attn", LINEAR | {"attention_bias": True}),
        ("Qwen3NextForCausalLM", "model.layers.0.mlp", LINEAR),
        (
            "Qwen3NextForCausalLM",
            "model.layers.0.linear_attn",
            LINEAR,
        ),
        ("Qwen3_5ForCausalLM", "model.layers.0.linear_attn", {"linear_num_key_heads": 4, "linear_num_value_heads": 4}),
        ("Qwen3_5MoeForCausalLM", "model.layers.3.self_attn", LINEAR | {"num_key_value_heads": 1}),
    ],
)
def test_layers(arch: str, name: str, overrides: dict[str, Any], size: int, tmp_path: Path) -> None:
    if size == 4 and not RUNS_LONG and "key_value_heads" not in str(overrides):
        pytest.skip("other layers are cut into four as into two; runs in make test-all")
    folder = make_checkpoint(arch, tmp_path, **overrides)
    whole = run_layer(name)(Harness(folder))
    sharded = run_sharded(folder, size, run_layer(name))
    torch.testing.assert_close(sharded[: sum(LENGTHS)], whole[: sum(LENGTHS)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", unless_long([4], [2, 4]))
@pytest.mark.parametrize(
    ("arch", "name", "overrides"),
    [
        ("JambaForCausalLM", "model.layers.0.mamba", {"mamba_proj_bias": True}),
        ("FalconMambaForCausalLM", "model.layers.0.mamba", {}),
        ("MambaForCausalLM", "model.layers.0.mamba", {}),
        ("MiniMaxForCausalLM", "model.layers.1.self_attn", {}),
        ("OlmoHybridForCausalLM", "model.layers.3.self_attn", LINEAR | {"num_key_value_heads": 2}),
    ],
)
def test_layers_with_sums_inside(arch: str, name: str, overrides: dict[str, Any], size: int, tmp_path: Path) -> None:
    folder = make_checkpoint(arch, tmp_path, **overrides)
    whole = run_layer(name)(Harness(folder))
    sharded = run_sharded(folder, size, run_layer(name), sums=[])
    torch.testing.assert_close(sharded[: sum(LENGTHS)], whole[: sum(LENGTHS)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_embeddings_of_ngrams(size: int, tmp_path: Path) -> None:
    """Tables are split by row, in a file of three tensors; what is added to the streams is whole on every rank."""
    folder = make_checkpoint("Qwen4ExpForCausalLM", tmp_path, **LINEAR)
    ids, streams = torch.arange(30) % 9, torch.randn(30, 3, 48, generator=torch.Generator().manual_seed(0))

    def run(harness: Harness) -> Tensor:
        layer: Callable[[Tensor, Tensor], Tensor] = harness.model.get_submodule("model.layers.3.ple")
        with forward_context(harness.context_for([(harness.sequence(ids.tolist()), 30)])), torch.no_grad():
            return layer(streams, ids).flatten(1) / harness.context.tp.size

    torch.testing.assert_close(run_sharded(folder, size, run, sums=[]), run(Harness(folder)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", unless_long([2], [2, 4]))
@pytest.mark.parametrize("overrides", [{}, {"use_shared_attention_adapter": False, "num_key_value_heads": 2}])
def test_shared_blocks(overrides: dict[str, Any], size: int, tmp_path: Path) -> None:
    """The third layer with a block, which reads the first one's weights beside its own adapters. Biases count once."""
    folder = make_checkpoint("Zamba2ForCausalLM", tmp_path, add_bias_linear=True, **ZAMBA2 | overrides)
    x, embeddings = torch.randn(2, 30, 48, generator=torch.Generator().manual_seed(0))

    def run(harness: Harness) -> Tensor:
        layer: Callable[[Tensor, Tensor], Tensor] = harness.model.get_submodule("model.layers.4.shared_block")
        with forward_context(harness.context_for([(harness.sequence([3] * 30), 30)])), torch.no_grad():
            return layer(x, embeddings)

    torch.testing.assert_close(run_sharded(folder, size, run, sums=[]), run(Harness(folder)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_convolutions_of_outputs(size: int, tmp_path: Path) -> None:
    """The sum over ranks is formed first, so every rank has the same result and the same state."""
    folder = make_checkpoint("InklingForCausalLM", tmp_path)
    x = torch.randn(30, 48, generator=torch.Generator().manual_seed(0))

    def run(harness: Harness) -> Tensor:
        layer: Callable[[Tensor], Tensor] = harness.model.get_submodule("model.layers.1.mlp_sconv")
        with forward_context(harness.context_for([(harness.sequence([3] * 30), 30)])), torch.no_grad():
            return layer(x / harness.context.tp.size) / harness.context.tp.size

    torch.testing.assert_close(run_sharded(folder, size, run, sums=[]), run(Harness(folder)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_the_head_for_drafts(size: int, tmp_path: Path) -> None:
    """The output of the head is whole on every rank."""
    folder, _ = make_mtp_checkpoint("Qwen3NextForCausalLM", tmp_path, **LINEAR)
    ids, hidden = torch.arange(9), torch.randn(9, 48)

    def run(harness: Harness) -> Tensor:
        head: Callable[[Tensor, Tensor], Tensor] = harness.model.get_submodule("mtp")
        with forward_context(harness.context_for([(harness.sequence(ids.tolist()), 9)])), torch.no_grad():
            return head(harness.model.model.embed_tokens(ids), hidden) / harness.context.tp.size

    whole = run(Harness(folder, mtp=True))
    torch.testing.assert_close(run_sharded(folder, size, run, sums=[], mtp=True), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arch", "overrides", "count"),
    [
        ("LlamaForCausalLM", {}, 2 * 2 + 1),
        ("NemotronHForCausalLM", NEMOTRON, 5 + 1),  # one norm to a layer
        ("MiniMaxForCausalLM", {"num_local_experts": 4}, 4 * 2 + 1),
        ("Gemma3ForCausalLM", {}, 1 + 4 * 2),  # those after the blocks, and the first one, which sums the embedding
        ("OlmoHybridForCausalLM", LINEAR, 1 + 4 * 2),
        ("Glm5NextForConditionalGeneration", {}, 1 + 4),  # one sum for both halves of a layer
        ("ZayaForCausalLM", {"num_experts": 4}, 1 + 4 * 2),
        ("Inkling2ForCausalLM", {}, 1 + 4 * 2),
        ("InklingForCausalLM", {}, 1 + 4 * 2),  # the embeddings, and the convolution after each half
        ("Zamba2ForCausalLM", ZAMBA2, 3 + 3 * 3 + 2 + 2),  # of 2 blocks in 3 layers; the embeddings, twice
    ],
)
def test_every_sum_over_ranks_is_formed_once(arch: str, overrides: dict[str, Any], count: int, tmp_path: Path) -> None:
    """All layers of one kind form the same sums, since one layer is compiled for all."""

    def sums_of(module: torch.nn.Module) -> list[str]:
        layers = (ResidualRMSNorm, OutputRMSNorm, ResidualSum, OutputConv)
        return [n for n, m in module.named_modules() if isinstance(m, layers) and m._all_reduce is not None]

    model = Harness(make_checkpoint(arch, tmp_path, **overrides), tp=Group(2).rank(0)).model
    assert len(sums_of(model)) == count
    kinds: dict[Any, list[str]] = {}
    assert all(kinds.setdefault(layer.kind, sums_of(layer)) == sums_of(layer) for layer in model.model.layers)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        ("GptOssForCausalLM", {"num_local_experts": 4}),
        ("Qwen3NextForCausalLM", LINEAR | {"num_experts": 8, "shared_expert_intermediate_size": 40}),
        ("KimiLinearForCausalLM", {}),
        ("InklingForCausalLM", {}),
        ("Inkling2ForCausalLM", {"n_routed_experts": 8}),
    ],
)
def test_whole_experts(arch: str, overrides: dict[str, Any], size: int, tmp_path: Path) -> None:
    """Every rank has its experts' biases, and a share of the shared expert."""
    folder = make_checkpoint(arch, tmp_path, **overrides)
    run = run_layer("model.layers.2.mlp")
    sharded, whole = run_sharded(folder, size, run, expert_parallel=True), run(Harness(folder))
    torch.testing.assert_close(sharded[: sum(LENGTHS)], whole[: sum(LENGTHS)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arch", ["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"])
def test_decode_of_sharded_gated_delta_net(arch: str, tmp_path: Path) -> None:
    """States of the shards are the heads of the whole state, and a decode step continues from them."""
    folder = make_checkpoint(arch, tmp_path)

    def run(harness: Harness) -> Tensor:
        layer = harness.model.get_submodule("model.layers.1.linear_attn")
        sequence = harness.sequence(list(range(20)))
        cache: Any = harness.caches["model.layers.1.linear_attn"]
        generator = torch.Generator().manual_seed(1)
        heads = cache["recurrent"].shape[1]
        conv_dim = cache["conv"].shape[1]
        full = torch.randn(4, *cache["recurrent"].shape[2:], generator=generator)
        first = 0 if heads == 4 else heads * layer.in_proj._tp.rank
        cache["recurrent"][sequence.slot] = full[first : first + heads]
        cache["conv"][sequence.slot] = torch.ones(conv_dim, cache["conv"].shape[2])
        sequence.num_computed = 9
        with forward_context(harness.context_for([(sequence, 1)])):
            return layer(torch.randn(1, harness.config.hidden_size, generator=generator))

    torch.testing.assert_close(run_sharded(folder, 2, run), run(Harness(folder)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("vocab_size", [64, 65, 67])
def test_embedding_and_head(vocab_size: int, size: int, tmp_path: Path) -> None:
    """Vocabularies that do not divide: the last shards are short."""
    overrides = {
        "vocab_size": vocab_size,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "intermediate_size": 12,
    }
    folder = make_checkpoint("LlamaForCausalLM", tmp_path, **overrides)
    ids = torch.arange(vocab_size)
    whole = Harness(folder).model
    vectors = whole.model.embed_tokens(ids)
    assert torch.equal(run_sharded(folder, size, lambda h: h.model.model.embed_tokens(ids)), vectors)
    logits = run_sharded(folder, size, lambda h: h.model.compute_logits(vectors))
    torch.testing.assert_close(logits, whole.compute_logits(vectors), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("arch", "size", "message"),
    [
        ("LlamaForCausalLM", 7, "num_attention_heads=4 is not divisible by tensor_parallel_size=7"),
        ("Qwen3_5ForCausalLM", 4, "linear_num_key_heads=2 is not divisible by tensor_parallel_size=4"),
    ],
)
def test_what_does_not_divide_is_refused(arch: str, size: int, message: str, tmp_path: Path) -> None:
    folder = make_checkpoint(arch, tmp_path)
    with pytest.raises(ConfigError, match=message):
        Harness(folder, tp=Group(size).rank(0))
