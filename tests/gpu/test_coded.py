"""Weights of 4 and 8 bits on a GPU: every tuned tile, the experts of published widths, and whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.coded_checkpoints import make_coded_checkpoint
from tests.gpu.test_precision import divergence
from tests.harness import Harness
from tests.models.test_parity import prompt
from tests.ops.linear.test_triton_coded import coded_matrix, inputs
from tests.ops.moe.test_triton_coded_moe import check_moe
from tests.quantization.test_coded_loading import make_gpt_oss
from tests.quantization.test_coded_parity import logits_of, reference
from weft import LLM, SamplingParams
from weft.ops.backend import Backend
from weft.ops.codes import dequantize_codes
from weft.ops.linear import coded

pytestmark = pytest.mark.gpu

ROWS = [(key, limit) for key, configs in coded.load_table().items() for limit in configs]
NEXT = "Qwen3NextForCausalLM"


@pytest.mark.parametrize(("key", "limit"), ROWS, ids=str)
def test_every_tile_of_the_linear_table(key: tuple[int, int, bool], limit: int) -> None:
    rows, inner, silu_mul = key
    matrix = coded_matrix("int4 g128", rows, inner, scale_dtype=torch.bfloat16)
    weight = dequantize_codes(matrix)
    for tokens in sorted({limit, limit // 2 + 1}):
        x = inputs(tokens, inner, torch.bfloat16)
        config = coded.load_table()[key][limit]
        run = coded.coded_linear_silu_mul_triton if silu_mul else coded.coded_linear_triton
        want = x.float() @ weight.t()
        if silu_mul:
            gate, up = want.chunk(2, dim=-1)
            want = torch.nn.functional.silu(gate) * up
        assert (run(x, matrix, config=config).float() - want).norm() < 6e-3 * want.norm()


@pytest.mark.parametrize("form", ["int4 g128", "nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("num_tokens", [1, 8, 33, 130])
def test_experts_of_the_published_widths(num_tokens: int, form: str) -> None:
    """With the tiles of the rule, for experts as wide as Qwen3-Next's; fewer of them fit the time."""
    check_moe((num_tokens, 16, 4, 2048, 512), form, torch.bfloat16, min(1, num_tokens - 1))


@pytest.mark.parametrize("kind", ["int4 g32", "int8 rows", "awq", "nvfp4", "mxfp4", "mxfp8", "gpt-oss"])
def test_a_model_diverges_no_more_than_its_dtype(kind: str, tmp_path: Path) -> None:
    """In float16, KL from float32 on the CPU: as small as two roundings of every weight and value make it.

    Tokens choose all experts: where float16 makes a token choose others, its KL is a thousand times that of rounding.
    """
    arch = "GptOssForCausalLM" if kind == "gpt-oss" else NEXT
    if kind == "gpt-oss":
        folder = make_gpt_oss(tmp_path, num_experts_per_tok=5)
    else:
        folder = make_coded_checkpoint(NEXT, kind, tmp_path, num_experts=5, num_experts_per_tok=5)
    prompts = [prompt(n) for n in (1, 65, 130)]
    exact = torch.cat([logits_of(reference(arch, tmp_path / "plain"), tokens) for tokens in prompts])
    harness = Harness(folder, device="cuda", backend=Backend.TRITON, dtype=torch.float16)
    sequences = [harness.sequence(tokens) for tokens in prompts]
    ours = torch.cat(harness.run([(s, len(s.tokens)) for s in sequences], pad_tokens=3, pad_seqs=1)).float().cpu()
    plain = Harness(tmp_path / "plain", device="cuda", backend=Backend.TRITON, dtype=torch.float16)
    sequences = [plain.sequence(tokens) for tokens in prompts]
    theirs = torch.cat(plain.run([(s, len(s.tokens)) for s in sequences], pad_tokens=3, pad_seqs=1)).float().cpu()
    (our_kl, _), (their_kl, _) = divergence(exact, ours), divergence(exact, theirs)
    assert our_kl <= 2 * their_kl + 1e-6, (our_kl, their_kl)


def test_graphs_give_the_tokens_of_eager_steps(tmp_path: Path) -> None:
    """INT4 in an engine: prompts and decodes, with graphs and without."""
    folder = make_coded_checkpoint(NEXT, "int4 g128", tmp_path)
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True, "max_num_seqs": 8, "max_model_len": 512, "num_kv_pages": 400,
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for eager in (True, False):
        with LLM(str(folder), enforce_eager=eager, **settings) as llm:
            outputs = llm.generate([prompt(n) for n in (3, 65, 130)], params, use_tqdm=False)
            found.append([list(o.outputs[0].token_ids) for o in outputs])
    assert sum(a == b for a, b in zip(*found, strict=True)) >= 2, "float sums of padded steps may part one of three"
