"""Images on the GPU: kernels against their references, whole engines against transformers in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import compiled_kernels
from tests.media import HYBRID_MOE, VL, Engine, Prompt, make_vision_checkpoint, reference_logits
from weft.ops.backend import Backend
from weft.ops.media_features import add_media_features
from weft.ops.vision_attention import frame_attention, rotate_patches

pytestmark = pytest.mark.gpu

PROMPTS = [
    Prompt().text(5).image(4, 6, 1).text(7),
    Prompt().text(3).image(2, 10, 3).image(6, 4, 4).text(2).video(3, 2, 4, 5),
    Prompt().text(30),
    Prompt().text(2).image(8, 8, 6),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 64), (16, 72), (3, 12)])
def test_tower_operations(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(150, 3, heads, head_dim, generator=generator, device="cuda").to(dtype)
    angles = torch.randn(150, head_dim // 2, generator=generator, device="cuda")
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    want = rotate_patches(qkv.double(), cos_sin, backend=Backend.TORCH)
    got = rotate_patches(qkv.clone(), cos_sin, backend=Backend.TRITON)
    torch.testing.assert_close(got.double(), want, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)
    attended = frame_attention(got, [64, 64, 22])
    exact = frame_attention(got.double(), [64, 64, 22])
    torch.testing.assert_close(attended.double(), exact, atol=1e-4 if dtype == torch.float32 else 2e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features(dtype: torch.dtype) -> None:
    x, features = torch.randn(37, 2560, device="cuda", dtype=dtype), torch.randn(40, 2560, device="cuda", dtype=dtype)
    features[5:] = torch.nan
    ids = torch.randint(0, 300, (37,), device="cuda")
    ids[[0, 7, 36]] = torch.tensor([300, 304, 302], device="cuda")
    want, got = (add_media_features(x, ids, features, 300, backend=backend) for backend in Backend)
    assert torch.equal(want, got)


@pytest.mark.parametrize("mode", ["NONE", "FULL", "PIECEWISE"])
@pytest.mark.parametrize("arch", [VL, HYBRID_MOE])
def test_engine(arch: str, mode: str, tmp_path: Path) -> None:
    """All prompts at once, in chunks that cut images, and then each again: the same tokens, no kernel compiled."""
    folder, reference = make_vision_checkpoint(arch, tmp_path)
    reference = reference.double()
    engine = Engine(folder, device="cuda", dtype="float32", cuda_graph_mode=mode, max_model_len=200,
                    max_num_batched_tokens=16, max_num_seqs=4)  # fmt: skip
    with compiled_kernels() as compiled:
        for requests in (engine.run(*PROMPTS, max_tokens=6), *(engine.run(p, max_tokens=6) for p in PROMPTS)):
            for request in requests:
                prompt = next(p for p in PROMPTS if p.token_ids == request.prompt_token_ids)
                tokens = prompt.token_ids + request.output_token_ids
                logits = reference_logits(reference, tokens, prompt.media)[len(prompt.token_ids) - 1 : -1]
                assert logits.argmax(-1).tolist() == request.output_token_ids
    assert not compiled
    assert engine.core.stats().encoder_seconds > 0
    engine.core.shutdown()
