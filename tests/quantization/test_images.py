"""Models that read images, in FP8: the decoder's products are quantised, the vision tower stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fp8_checkpoints import Reference, make_fp8_checkpoint
from tests.media import GLM, HYBRID, INKLING2, VL, Engine, Prompt, overrides, reference_inputs
from tests.quantization.test_parity import GLM5_SIZES
from tests.tiny import make_checkpoint
from tests.whole import unless_long
from weft.ops.fp8 import E4M3


def prompts_of(arch: str) -> list[Prompt]:
    empty = Prompt.of(arch)
    return [
        empty.text(5).image(4, 6, 1).text(7),
        empty.text(3).image(2, 10, 3).image(6, 4, 4).text(2).video(3, 2, 4, 5),
        empty.text(20),
    ]


SETTINGS: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "max_model_len": 100,
    "cpu_cache_gib": 0.05,
}


def keys(arch: str) -> dict[str, Any]:
    """Heads of 128 dimensions; all of them turn, or a quarter."""
    more = overrides(arch) | {"num_key_value_heads": 2}
    if arch == GLM:
        return more | GLM5_SIZES
    more["rope_parameters"] = more["rope_parameters"] | {"mrope_section": [24, 20, 20] if arch == VL else [12, 10, 10]}
    return more


@pytest.mark.parametrize("arch", unless_long([VL, HYBRID], [VL, HYBRID, GLM]))
def test_tokens_are_those_of_the_reference(arch: str, tmp_path: Path) -> None:
    """Or nearly as good ones: a sum in another order can bring a value to the other side of a rounding border."""
    folder = make_fp8_checkpoint(arch, "block", tmp_path, **keys(arch))
    reference = Reference(arch, tmp_path, "block")
    engine = Engine(folder, **SETTINGS)
    model = engine.core._executor._runner.model  # type: ignore[attr-defined]
    dtypes = {name.split(".")[1]: set() for name in ("model.visual.", "model.layers.")}
    for name, parameter in model.named_parameters():
        dtypes.get(name.split(".")[1], set()).add(parameter.dtype)
    assert dtypes["visual"] == {torch.float32} and E4M3 in dtypes["layers"]
    prompts = prompts_of(arch)
    for prompt, request in zip(prompts, engine.run(*prompts), strict=True):
        tokens = prompt.token_ids + request.output_token_ids
        logits = reference(**reference_inputs(reference.model, tokens, prompt.media)).logits[0]
        rows = logits[len(prompt.token_ids) - 1 : -1]
        short = rows.amax(-1) - rows[torch.arange(len(rows)), request.output_token_ids]
        assert (short <= rows.std(-1) / 10).all() and (short > 0).sum() <= 1, short


def test_a_tower_stays_as_it_is_while_weights_are_quantised(tmp_path: Path) -> None:
    """Inkling 2's decoder gets FP8 weights while it loads, and images the same embeddings as without."""
    folder, prompt = make_checkpoint(INKLING2, tmp_path, **overrides(INKLING2)), prompts_of(INKLING2)[1]
    embeddings = []
    for quantization in (None, "fp8"):
        engine = Engine(folder, **SETTINGS, quantization=quantization)
        dtypes = {p.dtype for p in engine.core._executor._runner.model.parameters()}  # type: ignore[attr-defined]
        assert (E4M3 in dtypes) == (quantization == "fp8")
        engine.run(prompt)
        embeddings.append(engine.core._executor._runner.media.embeddings)  # type: ignore[attr-defined]
    assert torch.equal(*embeddings) and embeddings[0].abs().sum() > 0
