"""FP8 checkpoints compute the function of transformers' model with the same weights and inputs rounded alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fp8_checkpoints import SCHEMES, Reference, make_fp8_checkpoint
from tests.harness import Harness, leave_parts
from tests.rounding import sums_in_order
from tests.whole import unless_long
from weft.layers.moe import Experts

ARCHITECTURES = [
    "LlamaForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
]
GLM5 = "Glm5NextForConditionalGeneration"
GLM5_SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "linear_head_dim": 64,
    "linear_num_heads": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "index_head_dim": 32,
}
JOINED = {"shared_expert_intermediate_size": 128}
"""Width of the other experts. The shared expert is then one of the experts, unless the scales of inputs are static."""
CASES = [(arch, "block") for arch in ARCHITECTURES] + [("Qwen3NextForCausalLM", scheme) for scheme in SCHEMES[1:]]
CASES += [("BailingHybridForCausalLM", "channel-token"), ("Qwen4ExpForCausalLM", "channel-token")]
CASES += [(GLM5, scheme) for scheme in SCHEMES[:2]]
CASES += [("ZayaForCausalLM", scheme) for scheme in SCHEMES[:2]]
LONG = [(arch, SCHEMES[1]) for arch in (GLM5, "ZayaForCausalLM")] + CASES[-6:-4]
LONG += [("Qwen3NextForCausalLM", scheme) for scheme in ("tensor-token", "tensor-static")]
LONG += [("Qwen3_5MoeForConditionalGeneration", "block")]
"""CI runs one family by each scheme, and others by block."""
LENGTHS = (1, *range(8, 15), 65, 130)
"""The short ones have rows before any value that fell to the other side, whatever the processor's order of sums."""
ALONE = [("Qwen3NextForCausalLM", "block"), ("Qwen3NextForCausalLM", "tensor-token")]
ALONE += [(arch, scheme) for arch in ("ZayaForCausalLM", GLM5) for scheme in SCHEMES[:2]]
"""Zaya has no shared experts, and those of GLM-5.3 are clamped."""
EQUAL_ROWS = 0.05 if sums_in_order() else 0.2
"""Least share of rows without a value that fell to the other side. How far the first one lies is inverse to the
difference of two sums, and sums without vectors of 16 differ by about sqrt(16) as much."""


def prompt(length: int) -> list[int]:
    return torch.randint(211, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def errors(got: Tensor, want: Tensor) -> Tensor:
    """Relative error of each row."""
    return (got - want).norm(dim=-1) / want.norm(dim=-1)


@pytest.mark.parametrize(("arch", "scheme"), unless_long([c for c in CASES if c not in LONG], CASES))
def test_logits(arch: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are equal until a value near a border of the rounding is rounded the other way. Later rows of the sequence
    differ a little then, and far less than with inputs that are not rounded. Decodes return partial sums, and the norms
    that follow add them, as on a GPU."""
    overrides: dict[str, Any] = (
        {"num_key_value_heads": 2} if arch.startswith(("Llama", "Bailing", "Zaya", "Glm5")) else {}
    )
    overrides |= GLM5_SIZES if arch == GLM5 else {}
    if arch.startswith("Zaya"):  # where a router of more layers chooses another expert for nearly every row
        overrides |= {"num_hidden_layers": 2, "layer_types": ["hybrid", "hybrid_sliding"]}
    joined = (arch, scheme) not in ALONE
    harness = Harness(make_fp8_checkpoint(arch, scheme, tmp_path, **overrides, **(JOINED if joined else {})))
    joins = [module.shared_joins for module in harness.model.modules() if isinstance(module, Experts)]
    assert all(join == (joined and "static" not in scheme and "Qwen3Moe" not in arch) for join in joins)
    reference = Reference(arch, tmp_path, scheme)
    exact = Reference(arch, tmp_path, scheme, rounds_inputs=False)
    sequences = [harness.sequence(prompt(n)) for n in LENGTHS]
    logits = harness.run([(s, len(s.tokens)) for s in sequences], pad_tokens=3, pad_seqs=1)
    got, want = torch.cat(logits), torch.cat([reference.logits(s.tokens) for s in sequences])
    unrounded = errors(torch.cat([exact.logits(s.tokens) for s in sequences]), want).median()
    assert errors(got, want).quantile(EQUAL_ROWS) < 1e-4 and errors(got, want).median() < unrounded / 5
    for sequence in sequences:
        sequence.tokens.append(17)
    left = leave_parts(monkeypatch)
    steps = torch.cat(harness.run([(s, 1) for s in sequences], pad_tokens=2, pad_seqs=2))
    want = torch.stack([reference.logits(s.tokens)[-1] for s in sequences])
    leaves_sums = arch not in ("Qwen4ExpForCausalLM", "ZayaForCausalLM", GLM5)  # their residuals take whole sums
    assert errors(steps, want).median() < unrounded / 2 and bool(left) == leaves_sums
