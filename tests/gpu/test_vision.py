"""Images on the GPU: kernels against their references, whole engines against transformers in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import compiled_kernels
from tests.gpu.test_precision import SEEDS, divergence, in_bfloat16
from tests.media import (
    GLM,
    HYBRID,
    HYBRID_MOE,
    INDEXED,
    INKLING,
    INKLING2,
    VL,
    VL_MOE,
    Engine,
    Prompt,
    assert_reference,
    make_vision_checkpoint,
    overrides,
    reference_logits,
)
from tests.models.mtp_reference import make_mtp_checkpoint
from weft.layers.context import ModelContext
from weft.layers.table import LayerTable
from weft.layers.vision import VisionLinear
from weft.messages import TokenLogprobs
from weft.ops.backend import Backend
from weft.ops.vision import add_media_features, frame_attention, norm_rotate_patches, rotate_patches
from weft.parallel.tensor_parallel import SingleRank

pytestmark = pytest.mark.gpu


def prompts_of(arch: str) -> list[Prompt]:
    empty = Prompt.of(arch)
    return [
        empty.text(5).image(4, 6, 1).text(7),
        empty.text(3).image(2, 10, 3).image(6, 4, 4).text(2).video(3, 2, 4, 5),
        empty.text(30),
        empty.text(2).image(8, 8, 6),
    ]


PROMPTS = prompts_of(VL)


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
    q, k = torch.randn(2, head_dim, generator=generator, device="cuda").to(dtype)
    normed = norm_rotate_patches(qkv.double(), q.double(), k.double(), 1e-5, cos_sin, backend=Backend.TORCH)
    fused = norm_rotate_patches(qkv.clone(), q, k, 1e-5, cos_sin, backend=Backend.TRITON)
    torch.testing.assert_close(fused.double(), normed, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)
    attended = frame_attention(got, [64, 64, 22])
    exact = frame_attention(got.double(), [64, 64, 22])
    torch.testing.assert_close(attended.double(), exact, atol=1e-4 if dtype == torch.float32 else 2e-2, rtol=1e-2)


@torch.inference_mode()
def test_activation_in_the_product() -> None:
    """The matrix library's own GELU is the tanh form."""
    context = ModelContext(torch.bfloat16, torch.device("cuda"), SingleRank(), Backend.TRITON, LayerTable(), 16)
    layer, x = VisionLinear(1024, 4096, context), torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    for parameter in layer.parameters():
        parameter.normal_(std=0.05)
    assert layer.bias is not None
    product = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    want = torch.nn.functional.gelu(product, approximate="tanh")
    torch.testing.assert_close(layer.activated(x, "gelu_pytorch_tanh").double(), want, atol=5e-3, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features(dtype: torch.dtype) -> None:
    x, features = torch.randn(37, 2560, device="cuda", dtype=dtype), torch.randn(40, 2560, device="cuda", dtype=dtype)
    features[5:] = torch.nan
    ids = torch.randint(0, 300, (37,), device="cuda")
    ids[[0, 7, 36]] = torch.tensor([300, 304, 302], device="cuda")
    want, got = (
        add_media_features(x, ids, features, 300, backend=backend) for backend in (Backend.TORCH, Backend.TRITON)
    )
    assert torch.equal(want, got)


@pytest.mark.parametrize("mode", ["NONE", "FULL", "PIECEWISE"])
@pytest.mark.parametrize("arch", [VL, HYBRID_MOE, INDEXED, GLM, INKLING2, INKLING])
def test_engine(arch: str, mode: str, tmp_path: Path) -> None:
    """All prompts at once, in chunks that cut images, and then each again: the same tokens, no kernel compiled."""
    folder, reference = make_vision_checkpoint(arch, tmp_path)
    if arch != INKLING2:  # transformers routes its tokens in float32
        reference = reference.double()
    prompts = prompts_of(arch)
    engine = Engine(folder, device="cuda", dtype="float32", cuda_graph_mode=mode, max_model_len=200,
                    max_num_batched_tokens=16, max_num_seqs=4)  # fmt: skip
    with compiled_kernels() as compiled:
        for requests in (engine.run(*prompts, max_tokens=6), *(engine.run(p, max_tokens=6) for p in prompts)):
            for request in requests:
                prompt = next(p for p in prompts if p.token_ids == request.prompt_token_ids.tolist())
                tokens = prompt.token_ids + request.output_token_ids
                logits = reference_logits(reference, tokens, prompt.media)[len(prompt.token_ids) - 1 : -1]
                assert logits.argmax(-1).tolist() == request.output_token_ids
    assert not compiled
    assert engine.core.stats().encoder_seconds > 0
    engine.core.shutdown()


@pytest.mark.parametrize("arch", [HYBRID, INDEXED])
def test_drafts_behind_images(arch: str, tmp_path: Path) -> None:
    """The drafts come from the model's own head, and are verified in graphs where the model can."""
    folder, head = make_mtp_checkpoint(arch, tmp_path, **overrides(arch))
    engine = Engine(folder, device="cuda", dtype="float32", cuda_graph_mode="FULL", max_model_len=200, max_num_seqs=4,
                    speculative_config={"method": "mtp", "num_speculative_tokens": 2})  # fmt: skip
    with compiled_kernels() as compiled:
        for prompt, request in zip(PROMPTS, engine.run(*PROMPTS, max_tokens=8), strict=True):
            assert_reference(head._model[0], prompt, request)
    assert not compiled and engine.core.stats().spec_decode_num_drafts
    engine.core.shutdown()


@pytest.mark.parametrize("arch", [VL, VL_MOE, HYBRID, HYBRID_MOE, INDEXED, GLM, INKLING2, INKLING])
def test_bfloat16_rounds_no_worse_than_transformers(arch: str, tmp_path: Path) -> None:
    """Prompts of text and images, every place of them: as ``test_precision.py`` has it for text."""
    check_bfloat16(arch, tmp_path, "cuda")


def check_bfloat16(arch: str, path: Path, device: str) -> None:
    logits = [three_logits(arch, path / str(seed), seed, device) for seed in SEEDS]
    exact, theirs, ours = (torch.cat(parts) for parts in zip(*logits, strict=True))
    (our_kl, our_share), (their_kl, their_share) = divergence(exact, ours), divergence(exact, theirs)
    assert our_kl <= 1.25 * their_kl, (our_kl, their_kl)
    assert our_share >= their_share - 0.01, (our_share, their_share)


def three_logits(arch: str, folder: Path, seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities of one checkpoint at every prompt position but the last: float32, transformers in bfloat16,
    Weft in bfloat16."""
    _, exact = make_vision_checkpoint(arch, folder, seed)
    theirs = in_bfloat16(make_vision_checkpoint(arch, folder, seed)[1]).to(device)
    engine = Engine(folder, device=device, dtype="bfloat16", max_num_seqs=4, max_model_len=300, cpu_cache_gib=0.05)
    empty = Prompt.of(arch)
    prompts = [empty.text(20, n).image(4, 6 + 2 * n, n).text(40, n + 50).image(8, 4, n + 100).text(40, n + 150)
               for n in range(16)]  # fmt: skip
    requests = engine.run(*prompts, max_tokens=1, prompt_logprobs=exact.config.text_config.vocab_size)
    engine.core.shutdown()
    ours = [torch.stack([_row(entry) for entry in request.prompt_logprobs]) for request in requests]
    parts = [[reference_logits(model, p.token_ids, p.media)[:-1].float().log_softmax(-1).cpu() for p in prompts]
             for model in (exact, theirs)]  # fmt: skip
    return torch.cat(parts[0]), torch.cat(parts[1]), torch.cat(ours)


def _row(entry: TokenLogprobs) -> torch.Tensor:
    """All log probabilities of one position, by token."""
    row = torch.full((max(entry.token_ids) + 1,), torch.nan)
    row[torch.tensor(entry.token_ids)] = torch.tensor(entry.logprobs)
    return row
