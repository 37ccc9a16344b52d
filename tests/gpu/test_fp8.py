"""FP8 on a GPU: every tuned configuration against float64 of the dequantised operands, and whole models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.fp8_checkpoints import SCHEMES, Reference, RoundedKeysAndValues, make_fp8_checkpoint
from tests.gpu.test_precision import divergence, logits_of
from tests.harness import Harness
from tests.models.test_parity import prompt
from tests.ops.linear.test_triton_fp8 import assert_near, fp8_matrix, inputs, product
from tests.ops.moe.test_triton_fp8_moe import check_moe
from tests.tiny import make_model
from weft.ops.attention import prefill_hopper as attention_prefill_hopper
from weft.ops.backend import Backend
from weft.ops.fp8 import E4M3, Fp8Matrix
from weft.ops.fp8.quantize import quantize_inputs_triton
from weft.ops.linear import fp8 as fp8_linear
from weft.ops.moe import fp8_experts as fp8_moe

pytestmark = pytest.mark.gpu

ROWS = [(key, limit) for key, configs in fp8_linear.load_table().items() for limit in configs]


@pytest.mark.parametrize(("key", "limit"), ROWS, ids=str)
def test_every_configuration_of_the_linear_table(key: tuple[int, int, bool, int], limit: int) -> None:
    """With as many tokens as it is for, and with padding; into a poisoned slice."""
    rows, inner, silu_mul, block = key
    weight, scale = fp8_matrix(rows, inner, block)
    for tokens in sorted({limit, limit // 2 + 1}):
        x, _ = inputs(tokens, inner, torch.bfloat16, "block" if block else "token")
        values, scales = quantize_inputs_triton(x, None, block=block)
        width = rows // 2 if silu_mul else rows
        out = fp8_linear.outputs(tokens, width, x).fill_(float("nan"))
        config = fp8_linear.load_table()[key][limit]
        matrix = Fp8Matrix(weight, scale, None, block)
        fp8_linear.fp8_product_triton(x, matrix, None, out, silu_mul=silu_mul, config=config)
        want = product(values, scales, weight, scale, block)
        if silu_mul:
            gate, up = want.chunk(2, dim=-1)
            want = torch.nn.functional.silu(gate) * up
        assert_near(out, want, 5e-3)


@pytest.mark.parametrize("num_tokens", [1, 8, 33, 130])
def test_experts_of_the_published_widths(num_tokens: int) -> None:
    """With the tiles that the rule has for this many tokens of Qwen3-Next; fewer experts fit the time."""
    tiles = fp8_moe.fp8_moe_tiles(num_tokens * 10, 512, 512, 128)
    check_moe((num_tokens, 16, 4, 2048, 512), "block", torch.bfloat16, min(1, num_tokens - 1), tiles)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_rounds_no_more_than_its_reference(scheme: str, tmp_path: Path) -> None:
    """KL divergence from the model without rounded inputs at most 1.1 times the reference's, over three checkpoints.

    Logits are not compared one by one. Hopper's tensor cores keep fewer bits of a sum of e4m3 products than float32
    has. An input near the middle of two e4m3 numbers may then round differently.
    """
    exact, reference, ours = (torch.cat(parts) for parts in zip(*three_logits(scheme, tmp_path), strict=True))
    (our_kl, _), (reference_kl, _) = divergence(exact, ours), divergence(exact, reference)
    assert our_kl <= 1.1 * reference_kl, (our_kl, reference_kl)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefills_over_an_fp8_cache(head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KL divergence from float32 with keys and values rounded alike: at most 1.1 times the kernel's in Triton."""
    model = make_model("Qwen3ForCausalLM", head_dim=head_dim, max_position_embeddings=2048)
    model.save_pretrained(tmp_path)
    prompts = [prompt(1900), prompt(1800), prompt(130), prompt(66)]
    exact = torch.cat([logits_of(RoundedKeysAndValues(model), tokens, "cpu") for tokens in prompts])
    ours, _ = divergence(exact, chunked_logits(tmp_path, prompts))
    monkeypatch.setattr(attention_prefill_hopper, "takes", lambda q, k_cache: False)
    theirs, _ = divergence(exact, chunked_logits(tmp_path, prompts))
    assert ours <= 1.1 * theirs, (ours, theirs)


def chunked_logits(folder: Path, prompts: list[list[int]]) -> torch.Tensor:
    """Return the logits of four prompts. The first is computed at once. The second is computed in chunks, together with
    the short third prompt and the last token of the fourth."""
    harness = Harness(folder, device="cuda", backend=Backend.TRITON, dtype=torch.bfloat16, kv_dtype=E4M3, num_pages=400)
    whole, long, short, other = sequences = [harness.sequence(tokens) for tokens in prompts]
    found: dict[int, list[torch.Tensor]] = {id(sequence): [] for sequence in sequences}
    steps = [[(whole, 1900)], [(other, 65)], [(long, 700)], [(long, 601), (other, 1), (short, 130)], [(long, 499)]]
    for step in steps:
        for (sequence, _), logits in zip(step, harness.run(step, pad_tokens=3, pad_seqs=1), strict=True):
            found[id(sequence)].append(logits.float().cpu())
    return torch.cat([logits for sequence in sequences for logits in found[id(sequence)]])


def three_logits(scheme: str, folder: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield float32 logits of each checkpoint: inputs not rounded, inputs rounded by the reference, Weft's kernels."""
    for seed in range(3):
        fp8 = make_fp8_checkpoint("Qwen3NextForCausalLM", scheme, folder / str(seed), seed=seed)
        prompts = [prompt(n) for n in (1, 65, 130)]
        harness = Harness(fp8, device="cuda", backend=Backend.TRITON)
        sequences = [harness.sequence(tokens) for tokens in prompts]
        ours = torch.cat(harness.run([(s, len(s.tokens)) for s in sequences], pad_tokens=3, pad_seqs=1))
        plain, rounded = (
            Reference("Qwen3NextForCausalLM", fp8.parent, scheme, rounds_inputs=rounds) for rounds in (False, True)
        )
        exact, reference = (torch.cat([model.logits(tokens) for tokens in prompts]) for model in (plain, rounded))
        yield exact, reference, ours.float().cpu()
