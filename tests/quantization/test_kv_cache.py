"""An FP8 KV cache: what is stored, what attention makes of it, in torch and in the kernels; scales and settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fp8_checkpoints import make_fp8_checkpoint
from tests.harness import Harness
from tests.ops.interpreter import DEVICE
from tests.tiny import make_checkpoint
from tests.whole import unless_long
from weft import LLM, SamplingParams
from weft.config import resolve
from weft.errors import ConfigError
from weft.forward_context import Batch
from weft.ops.attention import copy_pages, paged_attention
from weft.ops.backend import Backend
from weft.ops.fp8 import E4M3
from weft.ops.rotary import CacheSlots, HeadNorms, QkvHeads, qk_norm_rope

SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "cpu_cache_gib": 0.05, "max_num_seqs": 3}
PROMPT = list(range(40, 110))


def caches(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``[pages, 4 tokens, 2 heads, 16]``, poisoned."""
    shape = (12, 4, 2, 16)
    return tuple(torch.full(shape, float("nan"), device=DEVICE).to(dtype) for _ in range(2))  # type: ignore[return-value]


def store(
    cache: tuple[Tensor, Tensor], qkv: Tensor, backend: Backend, scales: tuple[Tensor | None, Tensor | None]
) -> Tensor:
    tokens = qkv.shape[0]
    cos_sin = torch.cat([torch.ones(64, 8), torch.zeros(64, 8)], 1).to(DEVICE)
    slots = CacheSlots(*cache, torch.arange(4, 4 + tokens, device=DEVICE), *scales)
    heads, norms = QkvHeads(4, 2, 16, gated=False), HeadNorms(None, None, 1e-6, zero_centered=False)
    positions = torch.arange(tokens, device=DEVICE)
    q, _ = qk_norm_rope(qkv, heads, norms, cos_sin, positions, slots, backend=backend)
    return q


@pytest.mark.parametrize("backend", [Backend.TORCH, Backend.TRITON])
@pytest.mark.parametrize("scaled", [False, True])
def test_what_is_stored(scaled: bool, backend: Backend) -> None:
    """Keys and values over their scale, rounded to e4m3; what it cannot hold saturates; queries take the scale on."""
    qkv = torch.randn(9, 8 * 16, device=DEVICE) * 100
    qkv[2, [70, 100]] = 1e4
    factors = (0.5, 0.25) if scaled else (1.0, 1.0)
    cache = caches(E4M3)
    scales = [torch.tensor([factor], device=DEVICE) if scaled else None for factor in factors]
    q = store(cache, qkv, backend, (scales[0], scales[1]))
    torch.testing.assert_close(q, qkv[:, :64].unflatten(1, (4, 16)) * factors[0])
    for stored, part, factor in zip(cache, (qkv[:, 64:96], qkv[:, 96:]), factors, strict=True):
        got = stored.flatten(0, 1)[4:13].float()
        want = (part / factor).clamp(-448, 448).to(E4M3).float().unflatten(1, (2, 16))
        assert torch.equal(got, want) and want.abs().max() == 448


def batch_of(query_lens: list[int], seq_lens: list[int]) -> Batch:
    cu = torch.tensor([0, *query_lens]).cumsum(0).int()
    return Batch(
        num_tokens=sum(query_lens), num_seqs=len(seq_lens), num_decodes=sum(n == 1 for n in query_lens),
        max_query_len=max(query_lens), max_seq_len=max(seq_lens), positions=torch.zeros(1), slot_mapping=torch.zeros(1),
        cu_seqlens_q=cu.to(DEVICE), seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        page_table=torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]], dtype=torch.int32, device=DEVICE),
        state_slots=torch.zeros(2, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip


@pytest.mark.parametrize("backend", [Backend.TORCH, Backend.TRITON])
@pytest.mark.parametrize("query_lens", [[1, 1], [1, 5], [9, 12]])
@pytest.mark.parametrize("dtype", [torch.float32] + [torch.bfloat16] * (DEVICE == "cuda"))
def test_attention_reads_what_was_stored(dtype: torch.dtype, query_lens: list[int], backend: Backend) -> None:
    """Attention equals attention over a float32 cache that holds the same numbers, times the scale of the values."""
    batch = batch_of(query_lens, [9, 14])
    values = [torch.randn(12, 4, 2, 16, device=DEVICE).to(E4M3) for _ in range(2)]
    q = torch.randn(sum(query_lens), 4, 16, device=DEVICE).to(dtype)
    got = paged_attention(q, *values, batch, scale=0.25, v_scale=torch.tensor([0.5], device=DEVICE), backend=backend)
    want = paged_attention(q.float(), *(c.float() for c in values), batch, scale=0.25, backend=Backend.TORCH) / 2
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(got.float(), want, **near)


def test_pages_are_copied() -> None:
    cache = torch.randn(5, 4, 2, 16).to(E4M3)
    before = cache.float()
    copy_pages([cache], torch.tensor([1, 2]), torch.tensor([3, 4]))
    assert torch.equal(cache.float(), before[[0, 1, 2, 1, 2]])


@pytest.mark.parametrize("mode", unless_long(["FULL"], ["NONE", "FULL", "FULL_AND_PIECEWISE"]))
def test_tokens_do_not_depend_on_the_way(mode: str, tmp_path: Path) -> None:
    """Cold, from the prefix cache, in graphs, beside others: what an engine without any of these generates."""
    folder = make_checkpoint("Qwen3NextForCausalLM", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [PROMPT, [*PROMPT[:33], 7, 8], PROMPT[:5]]
    with LLM(str(folder), kv_cache_dtype="fp8", enable_prefix_caching=False, **SETTINGS) as llm:
        want = [llm.generate([p], params, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
    with LLM(str(folder), kv_cache_dtype="fp8", cuda_graph_mode=mode, **SETTINGS) as llm:
        for _ in range(2):  # the second time from the cache
            got = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
            assert got == want


def test_planning_counts_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path)
    sizes = {}
    for dtype in ("auto", "fp8"):
        with caplog.at_level("WARNING"), LLM(str(folder), kv_cache_dtype=dtype, **SETTINGS) as llm:
            runner = llm._core._executor._runner
            sizes[dtype] = runner.spec.kv_bytes_per_token
            (cache, *_) = runner.caches.values()
            assert cache["k"].element_size() == (1 if dtype == "fp8" else 4)
    assert sizes["auto"] == 4 * sizes["fp8"]
    assert "the checkpoint has no scales of keys and values; 1.0 is used" in caplog.text


def test_another_name_of_the_setting() -> None:
    assert resolve(kv_cache_dtype="fp8_e4m3", device="cpu").kv_cache_dtype == "fp8"


def add_scales(folder: Path, value: float) -> None:
    """Add scales of K and V to a checkpoint, as ``compressed-tensors`` publishes them."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {
        "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        for kind in ("k", "v"):
            tensors[f"model.layers.{layer}.self_attn.{kind}_scale"] = torch.tensor([value])
    save_file(tensors, folder / "model.safetensors")


def test_scales_of_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are used where the cache is FP8, and only there: values around 1e-3 would not survive without."""
    folder = make_fp8_checkpoint("Qwen3ForCausalLM", "channel-token", tmp_path)
    add_scales(folder, 1e-2)
    exact = Harness(folder)
    assert exact.model.get_submodule("model.layers.0.self_attn").k_scale.item() == pytest.approx(1e-2)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=5)
    found, stored = [], []
    for dtype in ("auto", "fp8"):
        with caplog.at_level("WARNING"), LLM(str(folder), kv_cache_dtype=dtype, **SETTINGS) as llm:
            (entry,) = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].logprobs
            found.append(entry)
            cache = llm._core._executor._runner.caches["model.layers.0.self_attn"]
            stored.append({name: cache[name].float()[1:] for name in ("k", "v")})
    for name, exact_values in stored[0].items():  # the first layer's, which depend on no cache
        assert exact_values.any()
        torch.testing.assert_close(stored[1][name] * 1e-2, exact_values, rtol=1 / 16, atol=1e-2 * 2**-9)
    assert "1.0 is used" not in caplog.text
    best = max(found[0], key=lambda token: found[0][token].logprob)
    assert abs(found[1][best].logprob - found[0][best].logprob) < 0.2


def test_a_checkpoint_without_scales_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_fp8_checkpoint("Qwen3ForCausalLM", "channel-token", tmp_path)
    with caplog.at_level("WARNING"), LLM(str(folder), kv_cache_dtype="fp8", **SETTINGS):
        assert "the checkpoint has no scales of keys and values; 1.0 is used" in caplog.text


@pytest.mark.parametrize("arch", ["KimiLinearForCausalLM", "Mamba2ForCausalLM"])
def test_models_without_keys_and_values_in_pages_refuse_it(arch: str, tmp_path: Path) -> None:
    folder = make_checkpoint(arch, tmp_path)
    with pytest.raises(ConfigError, match=f"kv_cache_dtype=fp8 has no effect with {arch}"):
        resolve(model=str(folder), device="cpu", kv_cache_dtype="fp8")
