"""The x-matrix of models that read images: prompts with images in awkward places, a chunk border inside one among them.

Memory that nobody owns is NaN whenever a step starts, as in ``test_x_matrix.py``. Here this includes the encoder
cache's rows that hold no image, and all values that earlier steps have put into the rows of image tokens. The encoder
cache holds one large image or several small ones, so images are encoded again and again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isqrt
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters import ByModel, install
from tests.media import (
    END,
    GLM,
    HYBRID,
    HYBRID_MOE,
    IMAGE,
    INDEXED,
    INKLING,
    INKLING2,
    MERGE,
    START,
    VL,
    VL_MOE,
    item,
    overrides,
    reference_logits,
)
from tests.ranks import fork_ranks
from tests.shared import kept_open
from tests.tiny import make_checkpoint, make_model
from tests.whole import RUNS_LONG, unless_long
from tests.x_matrix import Poisoned, Reference, check, check_drafts, open_engine, prompt_of, runner_of
from weft.engine.llm import LLM
from weft.engine.prompts import PreparedPrompt
from weft.messages import SchedulerOutput
from weft.models.ngram import NGramVisionDecoder
from weft.multimodal.items import MediaItem
from weft.request import Request

LARGE = 256
"""Tokens of an image that a step's budget (512) cuts."""
PROMPTS = [
    [START, *[IMAGE] * 6, END, *prompt_of(20)],
    [*prompt_of(11), START, *[IMAGE] * 16, END, START, *[IMAGE] * 6, END, *prompt_of(40)],
    [*prompt_of(60), START, *[IMAGE] * 15],
    [*prompt_of(400), START, *[IMAGE] * LARGE, END, *prompt_of(342)],
]
"""Prompts with an image first, two adjacent images, one last (a hit runs its last token only), one across chunks."""
COLUMNS = [
    (VL, "FULL", "overlap", "exact"),
    (HYBRID, "FULL_DECODE_ONLY", "overlap", "exact"),
    *unless_long([], [(VL, "NONE", "in turn", "exact"), (VL_MOE, "FULL_AND_PIECEWISE", "overlap", "exact")]),
    *unless_long([], [(HYBRID, "FULL", "overlap", "aligned")]),
    *unless_long([], [(HYBRID_MOE, "FULL_AND_PIECEWISE", "in turn", "finish_only")]),
    (INDEXED, "FULL", "overlap", "exact"),
    *unless_long([], [(GLM, "FULL", "overlap", "exact")]),
    *unless_long([], [(INKLING2, "FULL", "overlap", "exact"), (INKLING2, "FULL_AND_PIECEWISE", "in turn", "aligned")]),
    *unless_long([], [(INKLING, "FULL", "overlap", "exact")]),
]
"""Model, graph mode, overlap, checkpoint policy."""
DRAFTING = [(HYBRID, "FULL_AND_PIECEWISE", "overlap", "exact"), *unless_long([], [(VL, "FULL", "in turn", "exact")])]
DRAFTING += unless_long([], [(arch, "FULL", "overlap", "exact") for arch in (INDEXED, GLM, INKLING2, INKLING)])
ON_TWO_RANKS = [(VL, "FULL", "overlap", "exact")]
ON_TWO_RANKS += unless_long([], [(arch, "FULL", "overlap", "exact") for arch in (INKLING2, GLM, INKLING)])
ON_TWO_RANKS += unless_long([], [(INDEXED, "FULL_AND_PIECEWISE", "overlap", "exact")])
ON_TWO_RANKS += unless_long([], [(HYBRID_MOE, "NONE", "in turn", "exact")])
ARCHITECTURES = {column[0] for column in (*COLUMNS, *ON_TWO_RANKS)}
CASES = [
    ("cold", "prefill", 3), ("cold", "mixed", 1), ("cold", "decode", 0),
    ("hit", "prefill", 2), ("hit", "mixed", 3), ("hit", "decode", 1),
    ("branch hit", "prefill", 3), ("branch hit", "mixed", 2), ("branch hit", "decode", 1),
    ("preempted", "prefill", 3), ("preempted", "mixed", 1), ("preempted", "decode", 2),
]  # fmt: skip


def media_of(token_ids: list[int], arch: str) -> list[MediaItem]:
    """An image for each run of placeholders; equally long ones are equal."""
    found, start = [], 0
    while IMAGE in token_ids[start:]:
        start = token_ids.index(IMAGE, start)
        count = next((n for n, token in enumerate(token_ids[start:]) if token != IMAGE), len(token_ids) - start)
        height = next(h for h in range(isqrt(count), 0, -1) if count % h == 0)
        grid = (1, MERGE * height, MERGE * count // height)
        found.append(item("image", grid, count, [(start, count)], arch))
        start += count
    return found


def prepare_images(llm: LLM, prompt: list[int], salt: str) -> None:
    """Let the next request of ``llm`` be ``prompt``, with images for its placeholders."""
    media = media_of(prompt, llm.config.model_config.wrapper or VL)
    llm._inputs.prepare_prompt = lambda *_: PreparedPrompt(None, prompt, [], salt, media)  # type: ignore[method-assign]


class ImageReference(Reference):
    """``Reference`` of prompts with images."""

    def _logits(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        return reference_logits(self._model, prompt + output, media_of(prompt, type(self._model).__name__))


class PoisonedImages(Poisoned):
    """``Poisoned``, with images for the placeholders of prompts."""

    def prompt_of(self, length: int) -> list[int]:
        return PROMPTS[length]

    def add(self, prompt: list[int], count: int, salt: str) -> Request:
        prepare_images(self.llm, prompt, salt)
        return super().add(prompt, count, salt)

    @torch.inference_mode()
    def poison(self, step: SchedulerOutput) -> None:
        super().poison(step)
        encoder, media = self.llm._core.scheduler.encoder, runner_of(self.llm).media
        assert encoder is not None and media is not None
        owned = torch.zeros(len(media.embeddings), dtype=torch.bool)
        for entry in encoder._entries.values():
            owned[entry.row : entry.row + entry.num_rows] = True
        for step in self.steps[-3:]:  # some may not have run yet
            for _, count, row in (span for request in step.requests for span in request.media):
                owned[row : row + count] = True
        media.embeddings[~owned] = torch.nan
        decoder = media._decoder
        decoder.embed_tokens.media_rows.fill_(torch.nan)
        decoder.features.fill_(torch.nan)
        if media._table is not None:
            media._table[media._base :] = torch.nan
        if media._places is not None:
            media._places.table[media._base :] = torch.nan
        if isinstance(decoder, NGramVisionDecoder):
            decoder._placeholders.fill_(-1)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    return {arch: make_reference(arch, tmp_path_factory.mktemp("tiny")) for arch in ARCHITECTURES}


def make_reference(arch: str, folder: Path) -> Reference:
    keys = overrides(arch) | {"max_position_embeddings": 1100}
    return ImageReference(make_model(arch, **keys), make_checkpoint(arch, folder, **keys))


@pytest.fixture(scope="module", params=COLUMNS, ids=lambda p: "-".join(p))
def engine(request: pytest.FixtureRequest, references: dict[str, Reference]) -> Iterator[Poisoned]:
    with open_column(request.param, references) as engine:
        yield engine


@pytest.fixture(scope="module", params=ON_TWO_RANKS, ids=lambda p: "-".join(p))
def sharded_engine(request: pytest.FixtureRequest, references: dict[str, Reference]) -> Iterator[Poisoned]:
    with fork_ranks(poisoned=True), open_column(request.param, references, tensor_parallel_size=2) as engine:
        yield engine


Column = tuple[str, str, str, str]


@pytest.fixture(scope="module")
def drafting_engine_of(references: dict[str, Reference]) -> Iterator[Callable[[Column], Poisoned]]:
    with kept_open(lambda column: open_drafting(column, references)) as engine_of:
        yield engine_of


@pytest.fixture
def drafting_engine(request: pytest.FixtureRequest, drafting_engine_of: Callable[[Column], Poisoned]) -> Poisoned:
    return drafting_engine_of(request.param)


@contextmanager
def open_drafting(column: Column, references: dict[str, Reference]) -> Iterator[Poisoned]:
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with open_column(column, references, speculative_config=drafts) as engine:
        install(engine.llm, ByModel(lambda tokens: engine.reference(tokens, 1)[0], random.Random(0)))
        yield engine
        assert engine.llm.stats().spec_decode_num_accepted_tokens > engine.num_cases, "too few drafts were accepted"


@contextmanager
def open_column(column: Column, references: dict[str, Reference], **more: Any) -> Iterator[PoisonedImages]:
    arch, mode, overlap, policy = column
    settings: dict[str, Any] = {"encoder_cache_size": LARGE + 4, "state_checkpoint_policy": policy}
    if mode != "NONE":
        patches = 1 if arch == INKLING else MERGE**2  # of a token
        settings["encoder_cuda_graph_patches"] = [16 * patches, LARGE * patches]
    with open_engine(arch, mode, overlap, "capture", references, PoisonedImages, **settings | more) as engine:
        engine.policy = policy
        yield engine
        graphs = runner_of(engine.llm).media.graphs.graphs
        assert (graphs is not None) == (mode != "NONE")
        assert graphs is None or not engine.num_cases or graphs.counters.replays


@pytest.mark.parametrize(("path", "phase", "prompt"), unless_long([CASES[i] for i in (2, 6, 10)], CASES))
def test_tokens_are_those_of_transformers(engine: Poisoned, path: str, phase: str, prompt: int) -> None:
    check(engine, path, phase, prompt)


@pytest.mark.parametrize(("path", "phase", "prompt"), unless_long([CASES[8], CASES[-1]], [*CASES[::4], CASES[-1]]))
def test_tokens_of_two_ranks(sharded_engine: Poisoned, path: str, phase: str, prompt: int) -> None:
    check(sharded_engine, path, phase, prompt)


@pytest.mark.parametrize(
    ("drafting_engine", "path", "prompt"),
    [
        (column, path, 1 if path == "cold" and column[0] != VL and not RUNS_LONG else prompt)
        for column in DRAFTING
        for path, prompt in (("cold", 3), ("hit", 2), ("branch hit", 1))
        if RUNS_LONG or path != "branch hit" or column[0] == HYBRID
    ],
    ids=lambda p: "-".join(p) if isinstance(p, tuple) else None,
    indirect=["drafting_engine"],
)
def test_tokens_with_drafts(drafting_engine: Poisoned, path: str, prompt: int) -> None:
    check_drafts(drafting_engine, path, prompt)
