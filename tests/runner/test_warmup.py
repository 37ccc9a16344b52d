"""The walk through all kinds of steps: the walk covers every size, and the runner can run every step of the walk."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fp8_checkpoints import GEOMETRY, make_fp8_checkpoint
from tests.models.mtp_reference import make_mtp_checkpoint
from tests.runner.test_architectures import FAMILIES
from tests.tiny import make_checkpoint
from tests.whole import RUNS_LONG, takes_long
from weft import LLM
from weft.config import resolve
from weft.ops.triton.gluon import GLUON_IS_KNOWN
from weft.runner.kernel_walk import walk_kernels
from weft.runner.model_runner import ModelRunner
from weft.runner.step_functions import StepFunctions
from weft.runner.warmup import SAMPLERS, StepLimits, covering_steps, powers_of_two, slow_steps


def test_powers_of_two_end_with_the_limit() -> None:
    assert [powers_of_two(n) for n in (1, 2, 4, 5, 9)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 8, 9]]


@pytest.mark.parametrize(
    "limits", [StepLimits(700, 21, 512), StepLimits(1, 1, 1), StepLimits(8, 8, 3), StepLimits(64, 1, 256)]
)
def test_steps_keep_the_limits_and_meet_their_ends(limits: StepLimits) -> None:
    slow = [*slow_steps(limits, state_slot=1)]
    steps = [*slow, *covering_steps(limits, state_slot=1)]
    assert steps[0].num_tokens == min(limits.max_num_batched_tokens, limits.max_model_len)
    assert [step.new_requests[0].sampling for step in slow[-len(SAMPLERS) :]] == [*SAMPLERS], "the slowest first"
    for step in steps:
        assert 0 < step.num_tokens <= limits.max_num_batched_tokens
        assert len(step.requests) <= limits.max_num_seqs
        ends = [request.start + request.num_tokens for request in step.requests]
        assert max(ends) <= limits.max_model_len
        decodes = [request.start > 0 and request.num_tokens == 1 for request in step.requests]
        assert decodes == sorted(decodes, reverse=True)
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    assert max(step.requests[0].num_tokens for step in steps) == longest
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    assert len(slow[1].requests) == most
    assert max(len(step.requests) for step in steps) == most
    if limits.max_num_batched_tokens > 3 * most > 3:  # as many tokens as can be, by as many sequences as can be
        assert max(o.num_tokens for o in steps if len(o.requests) == most) == limits.max_num_batched_tokens
    assert max(o.start + o.num_tokens for step in steps for o in step.requests) == limits.max_model_len


@pytest.mark.parametrize("arch", ["Qwen3NextForCausalLM", "Qwen3MoeForCausalLM"])
def test_every_step_runs(arch: str, tmp_path: Path) -> None:
    """And with one layer of each kind: four of this model's layers make two kinds, or two make one."""
    folder = make_checkpoint(arch, tmp_path)
    sizes = {"max_num_batched_tokens": 96, "max_num_seqs": 5, "max_model_len": 130, "page_size": 8}
    config = resolve(model=str(folder), device="cpu", cuda_graph_mode="FULL_DECODE_ONLY", **sizes)
    runner = ModelRunner(config)
    layers, ran = list(runner.model.model.layers), set()
    for layer in layers:
        layer.register_forward_hook(lambda module, args, out: ran.add(module))
    attach, made = runner.attach, []
    runner.attach = lambda plan: made.append(attach(plan) or runner.steps)  # type: ignore[method-assign, func-returns-value]
    walk_kernels(runner)
    assert len(ran) == (2 if "Next" in arch else 1)
    assert list(runner.model.model.layers) == layers
    assert not torch.any(made[-1].rows.last_token)


def test_every_captured_size_is_walked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Most sizes are captured without a run before: their kernels must be there."""
    seen: dict[str, set[int]] = {}

    def note(name: str) -> None:
        run = getattr(StepFunctions, name)

        def noted(self: StepFunctions, size: int) -> Any:
            seen.setdefault(name, set()).add(size)
            return run(self, size)

        monkeypatch.setattr(StepFunctions, name, noted)

    for name in ("decode", "forward", "sample"):
        note(name)
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path)
    sizes = {"max_num_batched_tokens": 96, "max_num_seqs": 21, "max_model_len": 130, "cuda_graph_mode": "FULL"}
    runner = ModelRunner(resolve(model=str(folder), device="cpu", **sizes))
    graphs, captured = runner.graphs, dict(seen)
    seen.clear()
    walk_kernels(runner)
    assert graphs.decode and graphs.forward and graphs.samples
    sizes_of = {"decode": graphs.decode.sizes, "forward": graphs.forward.sizes, "sample": graphs.samples.sizes}
    assert sizes_of == {name: sorted(walked) for name, walked in seen.items()}
    assert seen == captured


def test_a_start_tells_its_stages_and_collects_nothing() -> None:
    collections: list[str] = []
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        llm = LLM(device="cpu", skip_tokenizer_init=True, cpu_cache_gib=0.05, max_num_seqs=4)
    finally:
        del gc.callbacks[-1]
    assert collections.count("start") <= 1 and gc.isenabled(), "one may come when the collector is on again"
    with llm:
        stages = ["libraries", "config", "tokenizer", "model", "kernels", "weights", "memory", "caches", "graphs"]
        assert list(llm.startup) == stages and all(0 <= seconds < 60 for seconds in llm.startup.values())
        assert 0 < llm.startup["weights"] <= llm.startup["kernels"]


@takes_long  # tests/bench/test_startup.py asks a whole engine
def test_the_engine_loads_no_compiler_that_it_does_not_use() -> None:
    """Tracers and compilers of torch cost a start a second; nothing imports them until pieces are traced."""
    code = "import weft.engine.core, weft.executor.executor, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    unused = {"torch._dynamo", "torch._inductor", "sympy", "transformers", "triton"}
    assert not unused & set(done.stdout.split())


WARM: dict[str, Any] = GEOMETRY | {"max_position_embeddings": 1024}  # for several splits
WARM_HALVES: dict[str, Any] = WARM | {
    "num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4
}  # fmt: skip
"""Sizes of which one of two ranks has the heads of ``WARM``. Both then need many equal kernels, compiled once."""
WARM_FP8 = WARM | {"hidden_size": 1024, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
"""Sizes that the warps of a program can share."""


WITH_HEAD = ('{"method": "mtp", "num_speculative_tokens": 2}', "2")
"""Drafts, and ranks."""


@pytest.fixture(scope="module")
def warm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16, ``bf16``, with a head that drafts; and what was compiled for it, ``triton``."""
    folder = tmp_path_factory.mktemp("warm")
    make_mtp_checkpoint("Qwen3NextForCausalLM", folder / "bf16", **WARM_HALVES)
    return folder


OF_RANKS = ("_packed_all_reduce_kernel", "_all_reduce_norm_kernel", "_ahead_kernel")
OF_HOPPER = ("decode_hopper_kernel", "_fp8_few_rows_hopper_kernel", "_fp8_pairs_hopper_kernel")
"""Kernels of FP8 weights and of an FP8 cache."""


@takes_long
@pytest.mark.parametrize("cache", ["auto", pytest.param("fp8", marks=takes_long)])
def test_the_walk_meets_every_kernel_of_later_steps(cache: str, tmp_path: Path) -> None:
    """Compiled for a GPU that is not there: random steps need no kernel that the start had not compiled. In bfloat16,
    or in FP8, cache and all, on one rank with n-gram drafts. Where long tests do not run, kernels are asked for, and
    compiled once if ``test_architectures.py`` does not compile them."""
    if cache == "fp8":
        folder = make_fp8_checkpoint("Qwen3NextForCausalLM", "block", tmp_path / "fp8", **WARM_FP8)
    else:
        folder = make_checkpoint("Qwen3NextForCausalLM", tmp_path / "bf16", **WARM)
    ngram = '{"method": "ngram", "num_speculative_tokens": 3}'
    known = [] if RUNS_LONG else ["", FAMILIES["hybrid"].kernels]
    names = kernels_at_start(tmp_path / "triton", str(folder), ngram, "1", cache, *known)
    check_walked(names)
    own = ("_few_rows_kernel", *(OF_HOPPER if GLUON_IS_KNOWN else ())) if cache == "fp8" else ()
    for kernel in ("_ngram_kernel", *own):
        assert any(kernel in name for name in names)
    assert not any(kernel in name for name in names for kernel in OF_RANKS)


@takes_long
def test_the_walk_meets_both_forms_of_latent_attention(tmp_path: Path) -> None:
    """Prefills over expanded latents, absorbed ones, and both in a step. Nothing is compiled, only asked for."""
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    folder = make_checkpoint("KimiLinearForCausalLM", tmp_path / "bf16", max_position_embeddings=1024, **sizes)
    hopper = "expanded_latent_hopper._plan", "expanded_latent_hopper._expand", "prefill_hopper._prefill_hopper"
    known = [FAMILIES["hybrid"].kernels, FAMILIES["Kimi"].kernels, *(f"attention.{name}_kernel" for name in hopper)]
    names = kernels_at_start(tmp_path / "triton", str(folder), "", "1", "auto", "", " ".join(known))
    for kernel in ("_plan_kernel", "_expand_kernel", "_latent_attention_kernel"):
        assert any(kernel in name for name in names) or not GLUON_IS_KNOWN


@takes_long
def test_the_walk_of_a_rank_meets_every_kernel_of_later_steps(warm_folder: Path) -> None:
    """The same in bfloat16 with drafts of the model's own head, as one of two ranks."""
    names = kernels_at_start(warm_folder / "triton", str(warm_folder / "bf16"), *WITH_HEAD)
    check_walked(names)
    for kernel in OF_RANKS:
        assert any(kernel in name for name in names)


def check_walked(names: list[str]) -> None:
    assert len(names) > 20
    for kernel in ("_gdn_verify_kernel", "_follow_kernel", "_accept_kernel"):
        assert any(kernel in name for name in names)
    for kernel in ("_prefill_kernel", "_prefill_hopper_kernel"):  # whichever sequences decode, and who knows it
        assert sum(kernel in name for name in names) <= 1
    assert ("_prefill_hopper_kernel" in " ".join(names)) == GLUON_IS_KNOWN


@takes_long
def test_a_start_needs_nothing_private_of_a_triton_that_is_not_known(warm_folder: Path) -> None:
    """All that compiles then is in Triton, and compiled at start like the rest."""
    names = kernels_at_start(warm_folder / "triton", str(warm_folder / "bf16"), *WITH_HEAD, program="unknown_triton")
    for kernel in ("_prefill_kernel", "_decode_kernel", "_gdn_decode_kernel", "_scan_kernel"):
        assert any(kernel in name for name in names)
    assert not any("hopper" in name or "gluon" in name for name in names)


def kernels_at_start(cache: Path, *arguments: str, program: str = "compile_only") -> list[str]:
    """Return the kernels that a start compiles in a process of its own. Check that none is compiled later."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", f"tests.runner.{program}", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert kernels["later"] == []
    at_start: list[str] = kernels["at_start"]
    return at_start
