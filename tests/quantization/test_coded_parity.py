"""Checkpoints of 4 and 8 bits compute the function of transformers' model with the same weights dequantised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from tests.coded_checkpoints import KINDS, make_coded_checkpoint
from tests.harness import Harness
from tests.whole import unless_long
from weft.layers.moe import Experts

NEXT = "Qwen3NextForCausalLM"
OTHERS = ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"]
CASES = [(NEXT, kind) for kind in KINDS] + [(arch, "int4 g32") for arch in OTHERS] + [("LlamaForCausalLM", "awq")]
LENGTHS = (1, 65, 130)


def prompt(length: int) -> list[int]:
    return torch.randint(211, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def reference(arch: str, folder: Path) -> transformers.PreTrainedModel:
    kind = getattr(transformers, arch)
    config = kind.config_class.from_pretrained(folder)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    model: transformers.PreTrainedModel = kind.from_pretrained(folder, config=config).float().eval()
    return model


def logits_of(model: transformers.PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize(("arch", "kind"), unless_long([*CASES[:18:3], *CASES[-3:-1]], CASES))
def test_logits(arch: str, kind: str, tmp_path: Path) -> None:
    """Prompts and decodes, with padding; the shared expert is one of the others where it is as wide."""
    joined = {"shared_expert_intermediate_size": 128} if kind in ("int4 g32", "nvfp4") else {}
    harness = Harness(make_coded_checkpoint(arch, kind, tmp_path, **joined))
    assert all(
        m.shared_joins == bool(joined and "Qwen3Moe" not in arch)
        for m in harness.model.modules()
        if isinstance(m, Experts)
    )
    model = reference(arch, tmp_path / "plain")
    sequences = [harness.sequence(prompt(n)) for n in LENGTHS]
    got = torch.cat(harness.run([(s, len(s.tokens)) for s in sequences], pad_tokens=3, pad_seqs=1))
    want = torch.cat([logits_of(model, s.tokens) for s in sequences])
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    for sequence in sequences:
        sequence.tokens.append(17)
    steps = torch.cat(harness.run([(s, 1) for s in sequences], pad_tokens=2, pad_seqs=2))
    want = torch.stack([logits_of(model, s.tokens)[-1] for s in sequences])
    torch.testing.assert_close(steps, want, rtol=1e-3, atol=1e-3)
