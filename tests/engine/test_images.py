"""Prompts with images give transformers' tokens, whatever way they take through the engine: tiny models, float32."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from tests.harness import leave_parts
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
    reference_logits,
)
from tests.whole import unless_long
from weft.errors import ConfigError
from weft.forward_context import get_forward_context
from weft.multimodal.items import pixel_bytes
from weft.request import Request


def prompts_of(arch: str) -> list[Prompt]:
    empty = Prompt.of(arch)
    return [
        empty.text(5).image(4, 6, 1).text(7),
        empty.image(2, 6, 2, bare=True),
        empty.text(30),
        empty.text(3).image(2, 10, 3).image(6, 4, 4).text(2).video(3, 2, 4, 5),
        empty.text(3).image(4, 6, 1),
        empty.text(3).image(8, 8, 9).text(2),
    ]


PROMPTS = prompts_of(VL)
ALL = 211
"""Log probabilities of the whole vocabulary."""

Made = tuple[Path, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Architecture -> checkpoint and reference, made once."""
    models: dict[str, Made] = {}

    def get(arch: str) -> Made:
        if arch not in models:
            models[arch] = make_vision_checkpoint(arch, tmp_path_factory.mktemp(arch))
        return models[arch]

    return get


def engine_of(made: Made, **settings: Any) -> Engine:
    return Engine(made[0], **{"max_num_seqs": 4, "max_model_len": 100, "cpu_cache_gib": 0.05} | settings)


def check(reference: Any, prompts: list[Prompt], requests: list[Request]) -> None:
    for prompt, request in zip(prompts, requests, strict=True):
        assert_reference(reference, prompt, request)


GRAPHS = {"piecewise_cuda_graph_tokens": (8, 64), "enable_torch_compile_debug_mode": True, "cuda_graph_bs": (4,),
          "encoder_cuda_graph_patches": (32, 100)}  # fmt: skip
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "chunks that cut images": (VL, {"max_num_batched_tokens": 7, "max_num_seqs": 3}),
    "one image at a time": (VL_MOE, {"encoder_cache_size": 16, "max_num_encoder_input_tokens": 16}),
    "full graphs": (VL, {"cuda_graph_mode": "FULL", **GRAPHS}),
    "pieces": (VL_MOE, {"cuda_graph_mode": "PIECEWISE", **GRAPHS, "cuda_graph_bs": None}),
    "hybrid, chunks, overlap": (HYBRID, {"max_num_batched_tokens": 9, "enable_overlap": True}),
    "hybrid, graphs": (HYBRID_MOE, {"cuda_graph_mode": "FULL_AND_PIECEWISE", **GRAPHS}),
    "indexed, chunks, overlap": (INDEXED, {"max_num_batched_tokens": 7, "max_num_seqs": 3, "enable_overlap": True}),
    "indexed, graphs": (INDEXED, {"cuda_graph_mode": "FULL_AND_PIECEWISE", **GRAPHS}),
    "GLM, chunks, overlap": (GLM, {"max_num_batched_tokens": 9, "enable_overlap": True}),
    "GLM, full graphs": (GLM, {"cuda_graph_mode": "FULL", **GRAPHS}),
    "GLM, pieces": (GLM, {"cuda_graph_mode": "FULL_AND_PIECEWISE", **GRAPHS}),
    "Inkling 2, chunks, overlap": (INKLING2, {"max_num_batched_tokens": 9, "enable_overlap": True}),
    "Inkling 2, graphs": (INKLING2, {"cuda_graph_mode": "FULL_AND_PIECEWISE", **GRAPHS}),
    "Inkling, chunks, overlap": (INKLING, {"max_num_batched_tokens": 9, "enable_overlap": True}),
    "Inkling, graphs": (INKLING, {"cuda_graph_mode": "FULL_AND_PIECEWISE", **GRAPHS,
                                  "encoder_cuda_graph_patches": (8, 25)}),
}

QUICK = ("chunks that cut images", "one image at a time", "full graphs", "pieces", "hybrid, chunks, overlap",
         "GLM, full graphs", "Inkling 2, graphs", "Inkling, chunks, overlap")  # fmt: skip
"""The ways that ``make test`` runs: every kind of tower, and every kind of step."""


@pytest.mark.parametrize("way", unless_long(QUICK, WAYS))
def test_batches_of_text_and_images(way: str, made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch) -> None:
    """With sums left to the norms that follow, as on a GPU."""
    left = leave_parts(monkeypatch)
    arch, settings = WAYS[way]
    prompts, engine = prompts_of(arch), engine_of(made(arch), **settings)
    check(made(arch)[1], prompts, engine.run(*prompts, logprobs=ALL))
    few = [prompts[1], prompts[4]]
    again = engine.run(*few, logprobs=ALL)  # their last tokens alone: for one of them, of an image
    assert [request.num_cached_tokens for request in again] == [len(p.token_ids) - 1 for p in few]
    check(made(arch)[1], few, again)
    stats = engine.core.stats()
    assert stats.num_encoder_queries > stats.num_encoder_hits == (0 if way == "one image at a time" else 1)
    whole_sums = (INDEXED, GLM, INKLING2, INKLING)
    assert stats.encoder_seconds > 0 and bool(left) == (arch not in whole_sums)
    if "cuda_graph_mode" in settings:
        assert sum(stats.steps_by_mode.get(mode, 0) for mode in ("FULL", "PIECEWISE")) > 2
        assert_encoder_graphs(engine)


def assert_encoder_graphs(engine: Engine) -> None:
    """Some images ran as a graph of the tower, with padding, and some together were too many for any."""
    media = engine.core._executor._runner.media  # type: ignore[attr-defined]
    counters = media.graphs.graphs.counters
    assert counters.replays and counters.padding_rows
    assert counters.missed


@pytest.mark.parametrize("arch", [VL, GLM, INKLING2, INKLING, *unless_long([], [HYBRID, INDEXED])])
def test_every_prompt_position(arch: str, made: Callable[[str], Made]) -> None:
    """Chunk borders everywhere in turn: logits within 1e-4 at every position, and far into the answer."""
    prompt, reference = prompts_of(arch)[3], made(arch)[1]
    for budget in unless_long([5], [4, 5]):
        engine = engine_of(made(arch), max_num_batched_tokens=budget, max_num_seqs=1)
        (request,) = engine.run(prompt, max_tokens=12, logprobs=ALL, prompt_logprobs=0)
        check(reference, [prompt], [request])
        want = reference_logits(reference, prompt.token_ids, prompt.media).log_softmax(-1)
        assert len(request.prompt_logprobs) == len(prompt.token_ids) - 1
        for position, entry in enumerate(request.prompt_logprobs):
            token = prompt.token_ids[position + 1]
            assert abs(want[position, token].item() - entry.logprobs[entry.token_ids.index(token)]) < 1e-4


@pytest.mark.parametrize("arch", unless_long([VL], [VL, HYBRID, INDEXED, GLM, INKLING2]))
def test_preempted_requests_go_on(arch: str, made: Callable[[str], Made]) -> None:
    settings = {"num_kv_pages": 24, "page_size": 4, "max_num_seqs": 4, "enable_overlap": True}
    sizes = {"encoder_cache_size": 24, "max_num_encoder_input_tokens": 16, "max_num_batched_tokens": 12}
    engine = engine_of(made(arch), max_model_len=80, **settings, **sizes)
    prompts = [prompts_of(arch)[index] for index in (0, 3, 5)]
    requests = engine.run(*prompts, max_tokens=30)
    assert engine.core.stats().num_preemptions > 0
    check(made(arch)[1], prompts, requests)


@pytest.mark.parametrize("arch", unless_long([VL, HYBRID_MOE], [VL, HYBRID_MOE, INDEXED, GLM, INKLING2, INKLING]))
def test_the_prefix_cache_knows_images(arch: str, made: Callable[[str], Made]) -> None:
    """Equal text with another image of the same size never hits beyond it; the same image does, at any token."""
    reference, engine = made(arch)[1], engine_of(made(arch))
    head = Prompt.of(arch).text(6)
    first, swapped = (head.image(4, 6, seed).text(9) for seed in (1, 2))
    turn = replace(first, token_ids=[*first.token_ids, 50, 51, 52])
    two = first.image(4, 6, 2).text(3)
    hits = []
    for prompt in (first, swapped, turn, two, swapped):
        (request,) = engine.run(prompt, logprobs=ALL)
        check(reference, [prompt], [request])
        hits.append((request.num_cached_tokens, request.cache_report))
    assert hits[1][1] is not None and hits[1][1].num_kv_tokens == 7  # the head, and what stands before the image
    assert f"at the image or video {swapped.media[0].content_hash.hex()[:8]}" in hits[1][1].reason
    end = len(first.token_ids)
    # A hybrid model keeps a state one token before the prompt's end, and at the end once a request has stored one.
    assert [hits[2][0], hits[3][0]] == [end if arch == VL else end - 1, end]
    assert hits[4][0] == end - 1
    assert engine.core.stats().num_encoder_hits == 1  # the second image of ``two``
    look = engine.core.snapshot(tokens_per_node=100)
    spans = {span for node in look.nodes for span in node.media}
    assert (7, 6, first.media[0].content_hash.hex()[:8]) in spans
    assert (7, 6, swapped.media[0].content_hash.hex()[:8]) in spans
    assert all(token >= 0 for node in look.nodes for token in node.token_ids)
    assert all(request.path for request in look.requests)


@pytest.mark.parametrize(("arch", "sharded"), [(VL, False), (VL, True), (GLM, False), (GLM, True), (INKLING2, True)])
def test_a_checkpoint_without_the_towers_tensors_reads_text(
    arch: str, sharded: bool, made: Callable[[str], Made], tmp_path: Path
) -> None:
    """Although its config describes a tower, and a file that the index does not name has one."""
    folder, reference = made(arch)
    whole = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in whole.items() if ".visual." not in name}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    if sharded:
        index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        save_file(whole, tmp_path / "another.safetensors")
    engine, prompt = engine_of((tmp_path, reference)), Prompt().text(30)
    assert "no tensors of its vision tower" in engine.config.reasons["language_model_only"]
    check(reference, [prompt], engine.run(prompt, logprobs=ALL))
    with pytest.raises(ConfigError, match="language_model_only=False: the checkpoint's files hold no tensors"):
        engine_of((tmp_path, reference), language_model_only=False)


def test_image_tokens_of_glm_have_positions_like_texts(made: Callable[[str], Made]) -> None:
    """Its decoder has no rotary positions, so no image shortens those of what follows."""
    engine, prompt, seen = engine_of(made(GLM), max_num_batched_tokens=9), prompts_of(GLM)[3], list[int]()
    model = engine.core._executor._runner.model  # type: ignore[attr-defined]
    model.register_forward_pre_hook(lambda *_: seen.extend(get_forward_context().batch.positions.tolist()))
    engine.run(prompt)
    assert seen[-len(prompt.token_ids) - 3 :] == list(range(len(prompt.token_ids) + 3))


def test_salts_part_images_too(made: Callable[[str], Made]) -> None:
    engine, prompt = engine_of(made(VL)), Prompt().text(6).image(4, 6, 1).text(9)
    cached = [engine.run(prompt, cache_salt=salt)[0].num_cached_tokens for salt in ("a", "b", "a")]
    assert cached == [0, 0, len(prompt.token_ids) - 1]
    assert engine.core.stats().num_encoder_hits == 1  # an image's embeddings say nothing about who sent it


def test_memory_is_measured_with_as_much_as_a_step_encodes(
    made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that is no multiple of the parts in which it is encoded."""
    engine = engine_of(made(VL), encoder_cache_size=1500, max_num_encoder_input_tokens=1500)
    media, seen = engine.core._executor._runner.media, list[tuple[int, int]]()  # type: ignore[attr-defined]
    run = lambda patches, grids: seen.append((len(patches), sum(t * h * w for t, h, w in grids)))  # noqa: E731
    monkeypatch.setattr(media, "run_eager", run)
    media.run_largest()
    assert seen == [(1500 * media.merge**2,) * 2]


def test_small_images_in_runs_no_larger_than_was_measured(made: Callable[[str], Made]) -> None:
    """Each image of one token has as many rows for its class token."""
    sizes = {"encoder_cache_size": 64, "max_num_encoder_input_tokens": 8}
    engine, seen = engine_of(made(INKLING2), **sizes), list[int]()
    media = engine.core._executor._runner.media  # type: ignore[attr-defined]
    media._decoder.visual.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    media.run_largest()
    prompt = Prompt.of(INKLING2)
    for seed in range(7):
        prompt = prompt.image(2, 2, seed)
    check(made(INKLING2)[1], [prompt], engine.run(prompt, logprobs=ALL))
    assert seen == [36, 32, 24]


def test_in_a_context_shorter_than_the_models(made: Callable[[str], Made]) -> None:
    """Where the angles of images stand follows from the model's context, not from what is left of it in the cache."""
    engine = engine_of(made(VL), num_kv_pages=5)
    assert engine.core.plan.max_model_len == 64 < engine.config.max_model_len
    check(made(VL)[1], [PROMPTS[0]], engine.run(PROMPTS[0], logprobs=ALL))


def test_what_a_broken_step_was_to_encode_is_encoded_again(
    made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*step: Any) -> None:
        raise RuntimeError("broken")

    engine = engine_of(made(VL))
    with monkeypatch.context() as patch:
        patch.setattr(engine.core._executor, "launch", breaks)
        with pytest.raises(RuntimeError, match="broken"):
            engine.run(PROMPTS[0])
    check(made(VL)[1], [PROMPTS[0]], engine.run(PROMPTS[0], logprobs=ALL))


def test_a_request_that_has_ended_keeps_no_pixels(made: Callable[[str], Made]) -> None:
    """The inspector remembers many of them. Nor do their rows keep positions, with which every step has more to do."""
    engine = engine_of(made(VL))
    requests = engine.run(PROMPTS[0], PROMPTS[1])
    assert all(request.media and not item.pixel_values for request in requests for item in request.media)
    engine.run(PROMPTS[2])
    assert not engine.core._executor._runner.steps.rows.rope_positions  # type: ignore[attr-defined]


@pytest.mark.parametrize("arch", unless_long([HYBRID], [HYBRID, INDEXED]))
def test_random_conversations_with_few_images(arch: str, made: Callable[[str], Made]) -> None:
    """Branching prompts over three images, several at a time, in small pools: cached or not, the same tokens."""
    rng, engine = random.Random(1), engine_of(
        made(arch), num_kv_pages=40, page_size=4, num_state_slots=12, max_num_batched_tokens=24,
        encoder_cache_size=16, max_num_encoder_input_tokens=16,
    )  # fmt: skip
    known, cached = [Prompt().text(4)], 0
    for _ in range(8):
        batch = []
        for _ in range(2):
            prompt = rng.choice(known)
            grows = len(prompt.token_ids) < 50
            prompt = prompt.image(*rng.choice([(4, 4), (2, 6)]), seed=rng.randint(0, 1)) if grows else known[0]
            batch.append(prompt.text(rng.randint(1, 6), seed=rng.randint(0, 1)))
        requests = engine.run(*batch, max_tokens=3)
        check(made(arch)[1], batch, requests)
        cached += sum(request.num_cached_tokens or 0 for request in requests)
        known += batch
    assert cached > 100


@pytest.mark.parametrize(
    ("mode", "want"),
    [("FULL", "FULL"), ("FULL_DECODE_ONLY", "NONE"), ("FULL_AND_PIECEWISE", "PIECEWISE"), ("PIECEWISE", "PIECEWISE")],
)
def test_a_step_of_one_image_token_is_no_decode(mode: str, want: str, made: Callable[[str], Made]) -> None:
    """All of a prompt is cached but its last token, which belongs to an image. The step runs like any mixture."""
    sizes: dict[str, Any] = {"cuda_graph_bs": (1,)} if "FULL" in mode else {}
    sizes |= {} if mode == "FULL_DECODE_ONLY" else {"piecewise_cuda_graph_tokens": (1, 8)}
    engine = engine_of(made(VL), cuda_graph_mode=mode, encoder_cuda_graph_patches=(0,), **sizes)
    for _ in range(2):
        before = dict(engine.core.stats().steps_by_mode)
        (request,) = engine.run(PROMPTS[1], max_tokens=1)
        check(made(VL)[1], [PROMPTS[1]], [request])
    after = engine.core.stats().steps_by_mode
    assert {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)} == {
        want: 1
    }


def test_pixels_of_another_dtype_are_rounded(made: Callable[[str], Made]) -> None:
    """Patches in the model's dtype or in float32: the same tokens, the same encoder cache."""
    prompt = Prompt().text(6).image(4, 6, 1).text(9)
    (item,) = prompt.media
    narrow = structs.replace(item, pixel_values=pixel_bytes(item.patches(), "bfloat16"), dtype="bfloat16")
    embeddings = []
    for media in ([item], [narrow]):
        engine = engine_of(made(VL), dtype="bfloat16")
        engine.run(Prompt(prompt.token_ids, media))
        embeddings.append(engine.core._executor._runner.media.embeddings[:6])  # type: ignore[attr-defined]
    assert torch.equal(*embeddings) and embeddings[0].abs().sum() > 0
    assert torch.equal(torch.tensor(narrow.patches()), torch.tensor(item.patches()).bfloat16().float())
