"""A request with images, alone and in any company (``tests/deterministic.py``)."""

from __future__ import annotations

from typing import Any

from tests.deterministic import Alone, Bits, InCompany, check
from tests.media import END, IMAGE, START
from tests.test_x_matrix_images import LARGE, PROMPTS, PoisonedImages, prepare_images
from tests.x_matrix import open_engine, prompt_of, runner_of
from weft.request import Request


class AloneWithImages(Alone):
    def __call__(self, prompt: list[int]) -> Bits:
        prepare_images(self.llm, prompt, "")
        return super().__call__(prompt)


class ImagesInCompany(InCompany, PoisonedImages):
    def add(self, prompt: list[int], count: int, salt: str) -> Request:
        prepare_images(self.llm, prompt, salt)
        return InCompany.add(self, prompt, count, salt)


def check_images(alone: AloneWithImages, mode: str, cases: list[tuple[str, str, int]], **settings: Any) -> None:
    """Images of one step, of one prompt, and some that steps cut; then ``cases``: path, phase and prompt."""
    known: Any = {"": alone}
    more: dict[str, Any] = {"encoder_cache_size": LARGE + 4, "deterministic": True} | settings
    with open_engine("", mode, "overlap", "capture", known, ImagesInCompany, **more) as engine:
        assert isinstance(engine, ImagesInCompany)
        salt, media, sizes = engine.begin(), runner_of(engine.llm).media, list[int]()
        assert media is not None
        run = media.run
        media.run = lambda patches, grids: (sizes.append(len(grids)), run(patches, grids))[1]  # type: ignore[method-assign, func-returns-value]
        another = [START, *[IMAGE] * 35, END, *prompt_of(20)]
        together = [engine.add(prompt, 4, salt) for prompt in (another, PROMPTS[1], PROMPTS[0])]
        engine.finish()
        for request in together:
            alone.check(request)
        assert max(len(step.encodings) for step in engine.steps) > 1 == max(sizes), (
            "the tower encodes one item at a time"
        )
        for path, phase, prompt in cases:
            check(engine, path, phase, prompt)
