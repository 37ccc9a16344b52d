"""New weights in place: an updated engine answers bit for bit as one that was started from the new weights."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.coded_checkpoints import make_coded_checkpoint
from tests.fp8_checkpoints import make_fp8_checkpoint
from tests.media import VL, Engine, Prompt, make_vision_checkpoint
from tests.models.mtp_reference import make_mtp_checkpoint
from tests.ranks import fork_ranks
from tests.tiny import make_checkpoint
from tests.whole import RUNS_LONG, covering, takes_long, unless_long
from tests.x_matrix import runner_of
from weft import LLM, RequestOutput, SamplingParams
from weft.errors import ConfigError, EngineDeadError, UnavailableError, WeightsError
from weft.runner.rollouts import TakeTensors
from weft.weights import update as update_module
from weft.weights.sources import Tensors

HYBRID, MOE, DENSE, TIED = "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"
PROMPTS = [[(i * i + 3) % 190 for i in range(70)], [5, 6, 7], [(i * i + 3) % 190 for i in range(50)]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=9, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1),
]
Answer = list[Any]


def plain(arch: str, **overrides: Any) -> Callable[[Path, int], Path]:
    return lambda folder, seed: make_checkpoint(arch, folder, seed, **overrides)


def fp8(arch: str, scheme: str) -> Callable[[Path, int], Path]:
    return lambda folder, seed: make_fp8_checkpoint(arch, scheme, folder, seed=seed)


def coded(arch: str, kind: str) -> Callable[[Path, int], Path]:
    return lambda folder, seed: make_coded_checkpoint(arch, kind, folder, seed=seed)


def with_head(folder: Path, seed: int) -> Path:
    return make_mtp_checkpoint(HYBRID, folder, seed=seed)[0]


FULL = {
    "cuda_graph_mode": "FULL",
    "cuda_graph_bs": (1, 4),
    "piecewise_cuda_graph_tokens": (4, 8, 16, 32, 64, 128),
    "enable_torch_compile_debug_mode": True,
}
PIECES = {
    "cuda_graph_mode": "PIECEWISE",
    "piecewise_cuda_graph_tokens": (4, 128),
    "enable_torch_compile_debug_mode": True,
}
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
GROUPS = {"hidden_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
WIDE = {"hidden_size": 64, "intermediate_size": 128}
"""Widths that groups of 32 weights divide, on one rank and on two."""
CASES: dict[str, tuple[Callable[[Path, int], Path], dict[str, Any]]] = {
    "float32": (plain(HYBRID), {}),
    "bf16": (plain(HYBRID), {"dtype": "bfloat16"}),
    "mixture": (plain(MOE), FULL),
    "dense": (plain(DENSE, attention_bias=True), PIECES),
    "tied": (plain(TIED, tie_word_embeddings=True), {}),
    "gpt-oss": (plain("GptOssForCausalLM"), {}),
    "granite": (plain("GraniteMoeHybridForCausalLM"), {}),
    "latent attention": (plain("KimiLinearForCausalLM"), {}),
    "full": (plain(HYBRID), FULL),
    "pieces": (plain(HYBRID), PIECES),
    "inductor": (plain(DENSE), PIECES | {"piecewise_cuda_graph_compiler": "inductor"}),
    "fp8 online": (fp8(MOE, "block"), {}),
    "fp8": (plain(MOE, hidden_size=64), {"quantization": "fp8", **FULL}),
    "fp8 static": (fp8("Qwen3MoeForCausalLM", "tensor-static"), {}),
    "int4 online": (plain(MOE, **GROUPS), {"quantization": "int4", **FULL}),
    "int4": (coded(HYBRID, "int4 g64 zeros"), PIECES),
    "gptq": (coded("Qwen3MoeForCausalLM", "gptq"), {}),
    "nvfp4": (coded(DENSE, "nvfp4"), {}),
    "mxfp8": (coded(DENSE, "fp8 mx"), PIECES),
    "drafts": (with_head, DRAFTS),
    "drafts in graphs": (with_head, DRAFTS | FULL),
    "two ranks": (plain(HYBRID), {"tensor_parallel_size": 2}),
    "two ranks in graphs": (plain(MOE), {"tensor_parallel_size": 2} | FULL),
    "experts by rank": (
        plain("Qwen3MoeForCausalLM", num_experts=4), {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "int4 on two ranks": (plain(DENSE, **WIDE), {"tensor_parallel_size": 2, "quantization": "int4"}),
}  # fmt: skip

QUICK = ("bf16", "tied", "latent attention", "fp8 static", "nvfp4", "drafts")
"""The cases that ``make test`` runs: every kind of weights but those of gpt-oss. Two ranks are in
``test_weights_that_cannot_be_taken_back``."""


@pytest.fixture(autouse=True)
def _forks() -> Iterator[None]:
    with fork_ranks():
        yield


def engine(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"skip_tokenizer_init": True, "max_num_seqs": 4, "cpu_cache_gib": 0.02} | settings)


def answer(output: RequestOutput) -> Answer:
    done = output.outputs[0]
    assert done.logprobs is not None
    logprobs = [[entry.logprob for entry in position.values()] for position in done.logprobs]
    prompt = [p and [entry.logprob for entry in p.values()] for p in output.prompt_logprobs or []]
    return [done.token_ids, logprobs, prompt]


def answers(llm: LLM) -> list[Answer]:
    return [answer(output) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def num_replayed(llm: LLM) -> int:
    """Number of steps that replayed a graph."""
    return sum(count for mode, count in llm.stats().steps_by_mode.items() if mode != "NONE")


def tensors_of(folder: Path, seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint's tensors in random order."""
    items = list(load_file(folder / "model.safetensors").items())
    random.Random(seed).shuffle(items)
    return dict(items)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one hybrid model."""
    return tuple(make_checkpoint(HYBRID, tmp_path_factory.mktemp("hybrid"), seed) for seed in (0, 1))  # type: ignore[return-value]


@pytest.fixture
def llm(pair: tuple[Path, Path]) -> Iterator[LLM]:
    with engine(pair[0]) as llm:
        yield llm


@pytest.mark.parametrize("case", unless_long(QUICK, CASES))
def test_answers_are_those_of_a_fresh_engine(case: str, tmp_path: Path) -> None:
    make, settings = CASES[case]
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    old, new = (make(folder, seed) for seed, folder in enumerate(folders))
    with engine(new, **settings) as fresh:
        want = answers(fresh)
    with engine(old, **settings) as llm:
        before = answers(llm)
        assert before != want
        replayed = num_replayed(llm)
        assert llm.update_weights(tensors_of(new)) == 1
        assert answers(llm) == want
        assert llm.update_weights_from_path(old) == 2
        assert answers(llm) == before
        if RUNS_LONG or case == "bf16":
            assert llm.update_weights(iter(tensors_of(new, 1).items())) == 3
            assert answers(llm) == want
        assert (replayed > 0) == ("cuda_graph_mode" in settings)
        assert num_replayed(llm) >= (4 if RUNS_LONG else 3) * replayed
        llm._core.scheduler.check()


def test_a_vision_tower_and_its_cached_images(tmp_path: Path) -> None:
    prompt = Prompt().text(5).image(4, 6, 1).text(7)
    folders = [tmp_path / name for name in "ab"]
    for seed, folder in enumerate(folders):
        make_vision_checkpoint(VL, folder, seed)
    settings: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 100, "cpu_cache_gib": 0.05}

    def run(engine: Engine) -> Answer:
        (request,) = engine.run(prompt, logprobs=3)
        return [request.output_token_ids, [entry.logprobs for entry in request.logprobs]]

    fresh = Engine(folders[1], **settings)
    want = run(fresh)
    updated = Engine(folders[0], **settings)
    assert run(updated) != want
    rollouts, tower = updated.core.rollouts, {n: t for n, t in tensors_of(folders[1]).items() if "visual" in n}
    rest = {name: t for name, t in tensors_of(folders[1]).items() if name not in tower}
    for part in (rest, tower):
        rollouts.pause("wait")
        assert rollouts.is_quiet
        rollouts.update(TakeTensors(), Tensors(part))
        rollouts.resume()
    assert run(updated) == want
    assert updated.core.stats().num_encoder_hits == 0
    for each in (fresh, updated):
        each.core.shutdown()


def test_a_part_of_the_tensors(pair: tuple[Path, Path], llm: LLM, tmp_path: Path) -> None:
    """Some tensors of each kind change, and a checkpoint with these alone replaced agrees."""
    from safetensors.torch import save_file

    old, new = (tensors_of(folder) for folder in pair)
    part = {name: new[name] for name in list(new)[::3]}
    for path in pair[0].glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    save_file(old | part, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with engine(tmp_path) as fresh:
        want = answers(fresh)
    answers(llm)
    llm.update_weights(part)
    assert answers(llm) == want


def test_no_stale_prefix_is_reused(pair: tuple[Path, Path]) -> None:
    with engine(pair[0], kv_offloading_size=0.05, num_kv_pages=16, max_model_len=128, max_num_seqs=2) as llm:
        for _ in range(2):
            cached = [o.num_cached_tokens for o in llm.generate(PROMPTS[:2], PARAMS[0], use_tqdm=False)]
        assert cached[0] == len(PROMPTS[0]) - 1
        hits = llm.stats().num_hit_tokens
        llm.update_weights(tensors_of(pair[1]))
        stats = llm.stats()
        assert stats.num_evictable_pages == 0 and stats.host_pages_in_use == stats.host_states_in_use == 0
        assert llm.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)[0].num_cached_tokens == 0
        assert llm.stats().num_hit_tokens == hits and stats.num_external_hit_tokens == 0


def test_files_of_new_weights_are_not_found_by_the_old(pair: tuple[Path, Path], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kv_offloading_size": 0.05, "kv_offloading_dir": tmp_path, "max_model_len": 128}
    with engine(pair[0], **settings) as llm:
        want = answers(llm)
        llm.update_weights_from_path(pair[1])
        answers(llm)
    assert list(tmp_path.rglob("*")), "the update's prefixes are in files"
    with engine(pair[0], **settings) as llm:
        assert answers(llm) == want
        assert llm.stats().num_external_hit_tokens == 0


def opened(llm: LLM) -> list[str]:
    """Open requests: two have tokens, the third is in its prefill, and the last three wait."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    ids = [llm.add_request(PROMPTS[1], params), llm.add_request(PROMPTS[2], params)]
    for _ in range(4):
        llm.step()
    ids.append(llm.add_request(PROMPTS[0], params))
    llm.step()
    return [*ids, *(llm.add_request([9, 8, i], params) for i in range(3))]


def finish(llm: LLM) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    while not llm.is_finished():
        done |= {o.request_id: o for o in llm.step() if o.finished}
        llm._core.scheduler.check()
    return done


def test_mode_wait_ends_requests_with_the_old_weights(pair: tuple[Path, Path], llm: LLM) -> None:
    with engine(pair[0]) as other:
        opened(other)
        want = {i: answer(o) for i, o in finish(other).items()}
    ids = opened(llm)
    assert llm.update_weights(tensors_of(pair[1]), mode="wait") == 1
    done = finish(llm)
    assert {i: answer(o) for i, o in done.items()} == want and list(done) != []
    assert {o.weight_version for o in done.values()} == {0} and sorted(done) == sorted(ids)


def test_mode_abort_ends_requests_with_what_they_have(pair: tuple[Path, Path], llm: LLM) -> None:
    ids = opened(llm)
    llm.update_weights(tensors_of(pair[1]), mode="abort")
    done = finish(llm)
    assert sorted(done) == sorted(ids)
    assert {o.outputs[0].finish_reason for o in done.values()} == {"abort"}
    assert len(done[ids[0]].outputs[0].token_ids) >= 3 and not done[ids[-1]].outputs[0].token_ids


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param(FULL, marks=takes_long),
        pytest.param({"tensor_parallel_size": 2}, marks=takes_long),
        {"kv_offloading_size": 0.05},
    ],
    ids=["plain", "full", "ranks", "tier"],
)
def test_mode_keep_goes_on_with_the_new_weights(pair: tuple[Path, Path], settings: dict[str, Any]) -> None:
    """The tokens after the update are those that the new weights give to the prompt and the tokens before it."""
    with engine(pair[0], **settings) as llm:
        ids = opened(llm)
        llm.update_weights(tensors_of(pair[1]), mode="keep")
        done = finish(llm)
    assert sorted(done) == sorted(ids)
    started = [o for o in done.values() if 0 in o.outputs[0].weight_versions]
    assert started and all(o.weight_version == 1 for o in done.values())
    with engine(pair[1]) as fresh:
        for output in done.values():
            made = output.outputs[0]
            old = made.weight_versions.count(0)
            assert made.weight_versions == [0] * old + [1] * (12 - old) and made.logprobs is not None
            prompt = [*output.prompt_token_ids, *made.token_ids[:old]]
            params = SamplingParams(temperature=0.0, max_tokens=12 - old, ignore_eos=True, logprobs=1)
            want = fresh.generate(prompt, params, use_tqdm=False)[0].outputs[0]
            assert want.token_ids == made.token_ids[old:] and want.logprobs is not None
            for mine, theirs in zip(made.logprobs[old:], want.logprobs, strict=True):
                assert max(abs(mine[t].logprob - theirs[t].logprob) for t in theirs) < 1e-4


BAD: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "unknown": (lambda t: t | {"model.foo": torch.zeros(2)}, r"1 unexpected: model.foo"),
    "shape": (lambda t: t | {"lm_head.weight": torch.zeros(2, 3)}, r"lm_head.weight is \[2, 3\]"),
    "dtype": (lambda t: t | {"lm_head.weight": t["lm_head.weight"].int()}, "lm_head.weight is I32"),
    "twice": (lambda t: [*t.items(), ("lm_head.weight", t["lm_head.weight"])], "1 given twice: lm_head.weight"),
    "no pair": (lambda t: [*t.items(), "lm_head.weight"], "pairs .*, not of str"),
    "no tensor": (lambda t: [*t.items(), ("lm_head.weight", 3)], "pairs .*, not of tuple"),
}


@pytest.mark.parametrize(
    ("bad", "streamed", "tp"),
    [
        *((bad, streamed, 1) for bad, streamed in covering(BAD, [False, True], of=1)),
        *((bad, streamed, 2) for bad, streamed in unless_long(
            [], product(["unknown", "no pair"], [False, True]))),
    ],
)  # fmt: skip
def test_bad_tensors_leave_the_old_weights(bad: str, streamed: bool, tp: int, pair: tuple[Path, Path]) -> None:
    change, message = BAD[bad]
    given = change(tensors_of(pair[1]))
    items = list(given.items()) if isinstance(given, dict) else given
    with engine(pair[0], tensor_parallel_size=tp) as llm:
        before = answers(llm)
        with pytest.raises(WeightsError, match=message) as caught:
            llm.update_weights(iter(items) if streamed else items)
        assert ("written back" if streamed else "nothing was changed") in str(caught.value)
        assert answers(llm) == before and llm.weight_version == 0
        llm.update_weights(tensors_of(pair[1]))
        assert answers(llm) != before


def test_an_iterator_that_raises(pair: tuple[Path, Path], llm: LLM) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(tensors_of(pair[1]).items())[:20]
        raise OSError("the trainer is gone")

    before = answers(llm)
    with pytest.raises(WeightsError, match=r"OSError: the trainer is gone .*written back"):
        llm.update_weights(broken())
    assert answers(llm) == before


@pytest.mark.parametrize("tp", [1, 2])
def test_weights_that_cannot_be_taken_back(tp: int, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine says that it has none, until an update brings all of them."""
    monkeypatch.setattr(update_module, "UNDO_BYTES", 0)
    with engine(pair[0], tensor_parallel_size=tp) as llm:
        before = answers(llm)
        ids = opened(llm)
        items = [*list(tensors_of(pair[1]).items())[:20], ("foo", torch.zeros(1))]
        with pytest.raises(UnavailableError):
            llm.update_weights(iter(items), mode="keep")
        assert {o.outputs[0].finish_reason for o in finish(llm).values()} == {"error"} and ids
        for call in (lambda: llm.generate([1], use_tqdm=False), lambda: llm.add_request([1])):
            with pytest.raises(UnavailableError, match=r"old ones are lost: .*foo.* Update all weights"):
                call()
        with pytest.raises(WeightsError, match="missing: "):
            llm.update_weights(dict(list(tensors_of(pair[0]).items())[:20]))
        with pytest.raises(UnavailableError):
            llm.generate([1], use_tqdm=False)
        llm.update_weights_from_path(pair[0])
        assert answers(llm) == before


def test_a_tied_head_may_repeat_the_embedding(tmp_path: Path) -> None:
    folder = make_checkpoint(TIED, tmp_path, tie_word_embeddings=True)
    with engine(folder) as llm:
        before = answers(llm)
        tensors = tensors_of(folder)
        embedding = tensors["model.embed_tokens.weight"]
        with pytest.raises(WeightsError, match=r"lm_head.weight differs from its embedding.*written back"):
            llm.update_weights(tensors | {"lm_head.weight": embedding + 1})
        llm.update_weights({"lm_head.weight": embedding} | tensors)
        assert answers(llm) == before


def test_static_scales_come_together(tmp_path: Path) -> None:
    """The largest of several scales counts, so a smaller new one needs the others."""
    folder = make_fp8_checkpoint(DENSE, "tensor-static", tmp_path)
    tensors = tensors_of(folder)
    name = "model.layers.0.self_attn.q_proj.input_scale"
    with engine(folder) as llm:
        with pytest.raises(WeightsError, match=r"whose largest value counts: .*k_proj.input_scale"):
            llm.update_weights({name: tensors[name]})
        scale = runner_of(llm).model.get_parameter("model.layers.0.self_attn.qkv_proj.input_scale")
        before = scale.item()
        scales = {f"model.layers.0.self_attn.{part}_proj.input_scale": torch.tensor(before / 2) for part in "qkv"}
        llm.update_weights(scales)
        assert scale.item() == before / 2


def test_a_rank_that_dies_in_an_update(pair: tuple[Path, Path]) -> None:
    llm = engine(pair[0], tensor_parallel_size=2)
    (rank,) = llm._core.executor._workers.ranks  # type: ignore[attr-defined]

    def items() -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(tensors_of(pair[1]).items()):
            if number == 10:
                os.kill(rank.pid, signal.SIGKILL)
            yield item

    with pytest.raises(EngineDeadError, match=r"rank 1 .* was killed by SIGKILL"):
        llm.update_weights(items())
    with pytest.raises(EngineDeadError, match="rank 1"):
        llm.generate([1], use_tqdm=False)
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.update_weights({})


def test_versions(pair: tuple[Path, Path], llm: LLM) -> None:
    assert llm.weight_version == 0
    assert llm.update_weights_from_path(pair[1], weight_version=7) == 7 == llm.stats().weight_version
    for bad in (7, 3, -1, True, "8", 1.5):
        with pytest.raises(ConfigError, match="above the present 7"):
            llm.update_weights_from_path(pair[0], weight_version=bad)  # type: ignore[arg-type]
    assert llm.update_weights({}) == 8
    output = llm.generate(PROMPTS[1], PARAMS[0], use_tqdm=False)[0]
    assert output.weight_version == 8 and output.outputs[0].weight_versions == [8] * 6
    with pytest.raises(ConfigError, match="mode='now' is not valid"):
        llm.update_weights({}, mode="now")


def test_a_folder_without_weights(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"holds no .*safetensors files"):
        llm.update_weights_from_path(tmp_path)


@takes_long
def test_memory_does_not_grow(pair: tuple[Path, Path], llm: LLM) -> None:
    """200 updates with requests between them."""
    tensors = [tensors_of(folder) for folder in pair]
    sizes = []
    for number in range(200):
        llm.update_weights(tensors[number % 2])
        llm.generate(PROMPTS[1], PARAMS[0], use_tqdm=False)
        if number in (49, 199):
            gc.collect()
            (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS")]
            sizes.append(int(line.split()[1]))
    assert sizes[1] - sizes[0] < 4000, f"{sizes} KiB"
