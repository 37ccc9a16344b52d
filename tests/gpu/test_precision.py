"""bfloat16 on the GPU: the kernels round no worse than transformers does, and the bundled model hardly changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.test_bundled_model import distance
from tests.harness import Harness
from tests.models.test_parity import ARCHITECTURES, prompt
from tests.tiny import make_checkpoint, make_model
from weft import LLM, SamplingParams
from weft.assets import EVAL_PATH
from weft.bench.evaluation import read_problems
from weft.ops.backend import Backend

pytestmark = pytest.mark.gpu

LENGTHS = tuple(range(140, 220, 4))
SEEDS = range(4)
"""Seeds of the checkpoints, each with some 3,600 places. In a random mixture of experts, rounding sends one place in
eight to other experts. These places hold three quarters of the divergence. On one checkpoint, the ratio of two equally
accurate programs therefore varies by a tenth (one standard deviation)."""


def logits_of(model: Any, tokens: list[int], device: str) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits[0].float().cpu()


def divergence(exact: Tensor, rounded: Tensor) -> tuple[float, float]:
    """Mean KL divergence of the distributions, and the share of places with the same best token."""
    p, q = exact.log_softmax(-1), rounded.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item(), (p.argmax(-1) == q.argmax(-1)).float().mean().item()


def in_bfloat16(model: Any) -> Any:
    """Convert transformers' model as it would load it. Routers of Inkling 2 run in float32 alone."""
    kept = model._keep_in_fp32_modules_strict or () if "Inkling2" in type(model).__name__ else ()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not any(part in name for part in kept):
            tensor.data = tensor.data.bfloat16()
    return model


def three_logits(arch: str, folder: Path, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of one checkpoint: in float32, by transformers in bfloat16, and by Weft in bfloat16."""
    make_checkpoint(arch, folder, seed)
    prompts = [prompt(n) for n in LENGTHS]
    exact = torch.cat([logits_of(make_model(arch, seed), tokens, "cpu") for tokens in prompts])
    theirs = in_bfloat16(make_model(arch, seed)).cuda()
    their_logits = torch.cat([logits_of(theirs, tokens, "cuda") for tokens in prompts])
    harness = Harness(folder, device="cuda", backend=Backend.TRITON, dtype=torch.bfloat16, num_pages=400, num_slots=40)
    sequences = [harness.sequence(tokens) for tokens in prompts]
    ours = torch.cat([harness.run([(s, len(s.tokens))])[0].float().cpu() for s in sequences])
    return exact, their_logits, ours


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bfloat16_rounds_no_worse_than_transformers(arch: str, tmp_path: Path) -> None:
    """KL divergence from float32 at most 1.25 times, best tokens at most one point less often the same."""
    logits = [three_logits(arch, tmp_path / str(seed), seed) for seed in SEEDS]
    exact, theirs, ours = (torch.cat(parts) for parts in zip(*logits, strict=True))
    (our_kl, our_share), (their_kl, their_share) = divergence(exact, ours), divergence(exact, theirs)
    assert our_kl <= 1.25 * their_kl, (our_kl, their_kl)
    assert our_share >= their_share - 0.01, (our_share, their_share)


def test_bfloat16_hardly_changes_the_bundled_model() -> None:
    """Argmax agreement above 99% and KL divergence below 1e-3 (over the likeliest 20 tokens) where it is sure."""
    prompts = [problem.messages for problem in read_problems(EVAL_PATH)[::20]]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=20)
    answers = []
    for settings in ({"device": "cpu", "dtype": "float32"}, {"device": "cuda", "dtype": "bfloat16"}):
        with LLM(**settings) as llm:  # type: ignore[arg-type]
            answers.append(llm.chat(prompts, params, use_tqdm=False))
    same, total, count = distance(*answers)
    assert count > 1000 and same > 0.99 and total < 1e-3
