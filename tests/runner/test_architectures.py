"""Kernels compile for the NVIDIA architectures that Weft names, and fit their shared memory: the compiler is asked.

CI compiles one variant of each kernel of a hybrid mixture of experts for capability 8.6, whose programs have the
least shared memory. ``make test-all`` compiles every kernel, and adds 8.0, 8.9, 9.0, 10.0 and 12.0.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.coded_checkpoints import make_coded_checkpoint
from tests.fp8_checkpoints import GEOMETRY
from tests.models.mtp_reference import make_mtp_checkpoint
from tests.tiny import make_checkpoint
from tests.whole import takes_long
from weft import ops
from weft.ops.triton.sizes import LEAST_SHARED_BYTES, fitting_stages

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Most shared memory of a program by capability (CUDA programming guide, table of compute capabilities)."""
NEXT = "Qwen3NextForCausalLM"
_NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
_MTP = '{"method": "mtp", "num_speculative_tokens": 2}'
_TWO_RANKS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


class Family(NamedTuple):
    """A model whose start needs kernels that no model before it needs.

    Attributes:
        sizes, settings: of the checkpoint and of the engine.
        kernels: what it adds, by module and name.
        capabilities: GPUs that run the model. Other GPUs refuse its settings by name.
        kind: of ``tests/coded_checkpoints.py``, in which the checkpoint's weights are stored.
    """

    architecture: str
    sizes: dict[str, Any]
    settings: dict[str, Any]
    kernels: str
    capabilities: tuple[int, ...] = tuple(SHARED_BYTES)
    kind: str = ""


FAMILIES = {
    "hybrid": Family(NEXT, GEOMETRY, {}, """
        activation.kernels._gate_kernel attention.decode._decode_kernel attention.merge.merge_kernel
        attention.pages._copy_kernel attention.prefill._prefill_kernel convolution.prefill._conv_kernel
        delta_rule.decode._gdn_decode_kernel delta_rule.gdn_prefill._gates_kernel delta_rule.gdn_prefill._prepare_kernel
        delta_rule.scan._scan_kernel linear.skinny._skinny_linear_kernel moe.combine._sum_kernel
        moe.experts._down_kernel moe.experts._up_kernel moe.groups._block_kernel moe.groups._few_kernel
        moe.groups._place_kernel moe.groups._rank_kernel moe.router._router_kernel norm.kernels._gated_rms_norm_kernel
        norm.kernels._rms_norm_kernel rotary.kernels._qk_norm_rope_kernel sampling.kernels._choose_kernel
        sampling.kernels._scan_kernel steps.inputs._load_kernel steps.results._store_kernel"""),
    "int4": Family(NEXT, GEOMETRY, {"quantization": "int4"}, """
        codes.widen._widen_kernel linear.coded._coded_linear_kernel moe.coded_experts._coded_experts_kernel"""),
    "mxfp8": Family("Qwen3MoeForCausalLM", {}, {}, "", kind="mxfp8"),
    "fp8": Family(NEXT, GEOMETRY, {"quantization": "fp8", "kv_cache_dtype": "fp8", "speculative_config": _NGRAM}, """
        delta_rule.verify._gdn_verify_kernel drafts.kernels._accept_kernel drafts.kernels._follow_kernel
        drafts.ngram._ngram_kernel fp8.quantize._quantize_kernel linear.fp8._many_rows_kernel
        linear.fp8_few_rows._fp8_few_rows_kernel moe.fp8_experts._fp8_down_kernel moe.fp8_experts._fp8_up_kernel
        moe.fp8_pairs._fp8_pairs_kernel""", (89, 90, 120)),
    "fp8 weights": Family(NEXT, GEOMETRY, {"quantization": "fp8"}, "", (100,)),
    "deterministic": Family(NEXT, GEOMETRY, {"deterministic": True}, """
        linear.invariant._span_kernel linear.invariant._spans_kernel""", (90,)),
    "two ranks": Family(
        NEXT, GEOMETRY | _TWO_RANKS, {"tensor_parallel_size": 2, "speculative_config": _MTP}, """
        collectives.packed._packed_all_reduce_kernel collectives.packed._receive_norm_kernel
        collectives.signalled._all_reduce_norm_kernel drafts.kernels._ahead_kernel"""),
    "lightning attention on two ranks": Family(
        "MiniMaxForCausalLM", {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
        {"tensor_parallel_size": 2}, """
        norm.kernels._mean_square_kernel norm.kernels._scale_by_mean_square_kernel"""),
    "Jamba": Family("JambaForCausalLM", {"hidden_size": 256, "head_dim": 64, "mamba_d_state": 16}, {}, """
        convolution.decode._conv_update_kernel mamba.scan._scan_step_kernel mamba.scan._selective_scan_kernel
        norm.kernels._split_norm_kernel"""),
    "Mamba-2": Family(
        "BambaForCausalLM", {"hidden_size": 256, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 128}, {}, """
        linear_attention.decode._step_kernel linear_attention.prefill._prepare_kernel
        linear_attention.prefill._scan_kernel mamba.mamba2._gates_kernel norm.kernels._group_norm_kernel"""),
    "Kimi": Family(
        "KimiLinearForCausalLM",
        {"hidden_size": 256, "linear_head_dim": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128}, {"speculative_config": _NGRAM}, """
        attention.latent._latent_attention_kernel delta_rule.kda_prefill._gates_kernel
        delta_rule.kda_prefill._prepare_kernel delta_rule.kda_prefill._solve_kernel"""),
    "GLM": Family(
        "Glm5NextForConditionalGeneration",
        {"hidden_size": 256, "linear_head_dim": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128,
         "index_head_dim": 128}, {"speculative_config": _MTP}, """
        indexed_attention.attend._indexed_attention_kernel indexed_attention.select._best_kernel
        indexed_attention.select._scores_kernel streams.kernels._read_streams_kernel
        streams.kernels._write_streams_kernel vision.kernels._norm_rotate_kernel"""),
    "Qwen4-Exp": Family(
        "Qwen4ExpForCausalLM", {"hidden_size": 256, "head_dim": 256, "indexer_head_dim": 128},
        {"speculative_config": _NGRAM}, """
        indexed_attention.dense._dense_kernel indexed_attention.dense._mark_pools_kernel
        streams.gated_kernels._add_to_streams_kernel streams.gated_kernels._mean_of_gated_kernel
        streams.gated_kernels._norm_streams_kernel streams.gated_kernels._silu_of_mean_kernel"""),
    "windows": Family("GptOssForCausalLM", {"hidden_size": 256, "head_dim": 64, "sliding_window": 512}, {}, """
        window_attention.kernels._store_windows_kernel window_attention.kernels._window_decode_kernel
        window_attention.kernels._window_merge_kernel window_attention.kernels._window_prefill_kernel"""),
    "ZAYA1": Family(
        "ZayaForCausalLM", {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 8, "sliding_window": 512,
                            "router_hidden_size": 256, "cca_time1": 2}, {}, "",
    ),
    "Inkling 2": Family(
        "Inkling2ForCausalLM",
        {"hidden_size": 256, "head_dim": 128, "swa_head_dim": 128, "sliding_window_size": 512, "rel_extent": 512}, {},
        "block_residual.kernels._read_blocks_kernel",
    ),
    "LFM2": Family("Lfm2ForCausalLM", {"hidden_size": 256}, {"speculative_config": _NGRAM}, ""),
    "RG-LRU": Family("RecurrentGemmaForCausalLM", {"hidden_size": 256, "lru_width": 256, "head_dim": 64}, {}, """
        rg_lru.scan._rg_lru_chunk_kernel rg_lru.scan._rg_lru_step_kernel rg_lru.scan._rg_lru_walk_kernel"""),
    "heads of 256": Family(NEXT, GEOMETRY | {"head_dim": 256}, {"speculative_config": _NGRAM}, ""),
    "heads of 464": Family(
        "ZambaForCausalLM", {"hidden_size": 928, "num_attention_heads": 4, "num_key_value_heads": 4}, {}, "",
    ),
    "images": Family("Qwen3VLForConditionalGeneration", {}, {}, """
        vision.kernels._add_kernel vision.kernels._add_layer_norm_kernel vision.kernels._bounded_attention_kernel
        vision.kernels._grid_positions_kernel vision.kernels._rotate_kernel"""),
}  # fmt: skip
ELSEWHERE = {
    "attention.record_kernel._record_kernel", "indexed_attention.attend._merge_splits_kernel",
    "linear.by_head._head_kernel",
}  # fmt: skip
"""Kernels that no start above compiles: copies between the tiers of the cache, and kernels for other sizes."""
HOPPER = re.compile("hopper|gluon")
"""Modules of kernels for Hopper alone (``tests/ops/attention/test_gluon_attention.py``). Others run elsewhere."""


def compiled(name: str, folder: Path, capabilities: list[str]) -> list[dict[str, Any]]:
    """Return the kernels of a family's start for the capabilities (each with ``:MOST`` variants of a kernel)."""
    family = FAMILIES[name]
    make = make_mtp_checkpoint if "mtp" in family.settings.get("speculative_config", "") else make_checkpoint
    sizes, model = family.sizes | {"max_position_embeddings": 1024}, folder / "model"
    if family.kind:
        model = make_coded_checkpoint(family.architecture, family.kind, model, **sizes)
    else:
        make(family.architecture, model, **sizes)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    words = [str(model), json.dumps(family.settings), *capabilities]
    command = [sys.executable, "-m", "tests.runner.compile_architectures", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


@takes_long
@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_fit(name: str, tmp_path: Path) -> None:
    """All variants of a kernel for the least shared memory, and three of them for every other capability."""
    least, *others = sorted(FAMILIES[name].capabilities, key=lambda capability: (SHARED_BYTES[capability], capability))
    rows = compiled(name, tmp_path, [f"{least}", *(f"{other}:3" for other in others)])
    assert [row for row in rows if "error" in row] == []
    assert [row for row in rows if row["shared"] > SHARED_BYTES[row["capability"]]] == []
    assert {row["kernel"] for row in rows} >= set(FAMILIES[name].kernels.split())


def test_every_kernel_has_a_family() -> None:
    root = Path(ops.__path__[0])
    every = {
        ".".join((*path.relative_to(root).with_suffix("").parts, node.name))
        for path in root.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list and node.name.endswith("_kernel")
    }
    named = {kernel for family in FAMILIES.values() for kernel in family.kernels.split()}
    assert {kernel for kernel in every if not HOPPER.search(kernel)} == named | ELSEWHERE


def test_stages_that_fit() -> None:
    """A pipeline of s stages has s - 1 buffers."""
    import torch

    assert min(SHARED_BYTES.values()) == LEAST_SHARED_BYTES
    assert [fitting_stages(4, size, torch.device("cpu")) for size in (49152, 30 << 10, 1 << 20)] == [3, 4, 1]
