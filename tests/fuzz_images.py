"""Random traffic with images and videos, against transformers: ``make fuzz-images``.

Job: engines and traffic as in ``tests/fuzz_engine.py``, in prompts that have pictures of random sizes in random places,
with hardly any rows for their embeddings. Owns: the pictures and the reference that sees them. Does not know: what a
right token is (``tests/fuzz_engine.py`` does).

    python -m tests.fuzz_images [--seconds 30] [--first 0] [--count N]

A failure says its seed; ``--first SEED --count 1`` repeats it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from tests import fuzz_engine
from tests.fuzz_engine import Sent
from tests.media import GLM, HYBRID, IMAGES_ALONE, INDEXED, INKLING, INKLING2, VL, VL_MOE, overrides, reference_logits
from tests.pictures import (
    GLM_TOP,
    INKLING_TOP,
    TOP,
    picture,
    save_glm_processor,
    save_inkling2_processor,
    save_inkling_processor,
    save_processor,
)
from tests.speculation.conftest import make_repeating_checkpoint
from tests.tiny import make_checkpoint
from tests.tiny_tokenizer import EOS_ID, VOCAB_SIZE
from weft import SamplingParams
from weft.errors import RequestError
from weft.multimodal.items import MediaItem
from weft.request import Request

REPEATING = f"{HYBRID} that repeats itself"
MODELS = (VL, VL_MOE, HYBRID, REPEATING, INDEXED, GLM, INKLING, INKLING2)
_PROCESSORS: dict[str, tuple[dict[str, int], Callable[[Path], None]]] = {
    GLM: (GLM_TOP, save_glm_processor),
    INKLING: (INKLING_TOP, partial(save_inkling_processor, rescale_image_max_upscaled_long_edge=24)),
    INKLING2: (INKLING_TOP, save_inkling2_processor),
}
SPECIAL, PLAIN = range(3, 9), 9
"""Tokens around and in place of pictures, and a token that is embedded like the placeholders. The model may sample any
of these."""


@dataclass(frozen=True)
class Picture:
    """Pixels; ``num_frames``: of a video, 0 for an image."""

    width: int
    height: int
    seed: int
    num_frames: int = 0

    def source(self) -> Any:
        if not self.num_frames:
            return picture(self.width, self.height, self.seed)
        return [np.asarray(picture(self.width, self.height, self.seed + i)) for i in range(self.num_frames)]


Part = int | Picture


class Tokens(list[int]):
    """A prompt as the engine runs it, or such a prompt and its output.

    Attributes:
        parts: the prompt as it was given.
        media: of the prompt.
    """

    def __init__(self, tokens: Iterable[int], parts: Sequence[Part], media: Sequence[MediaItem]) -> None:
        super().__init__(tokens)
        self.parts, self.media = list(parts), media

    def __add__(self, output: list[int]) -> Tokens:  # type: ignore[override]
        return Tokens([*self, *output], [*self.parts, *_texts(output)], self.media)


def _texts(tokens: Iterable[int]) -> list[int]:
    """Tokens of a text, which has no placeholders."""
    return [PLAIN if token in SPECIAL else token for token in tokens]


class Reference:
    """transformers' model of one architecture, and the folder that Weft loads it from.

    ``placeholders``: of images, and of videos if the model reads them. ``are_silent``: they must not be sampled, since
    the token in their place would have other n-grams.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.has_head, self.folder, self.are_silent = name == REPEATING, folder, name == INDEXED
        self.arch = HYBRID if self.has_head else name
        top, save = _PROCESSORS.get(name, (TOP, save_processor))
        self.placeholders = [top[f"{kind}_token_id"] for kind in ("image", "video") if f"{kind}_token_id" in top]
        own = overrides(self.arch)
        keys = own | {"top": own["top"] | top, "vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID}
        if name == INKLING2:
            keys["unpadded_vocab_size"] = VOCAB_SIZE
        keys.pop("silent", None)
        make = partial(make_repeating_checkpoint, head=True) if self.has_head else make_checkpoint
        make(self.arch, folder, **keys)
        save(folder)
        tensors = load_file(folder / "model.safetensors")
        for key in tensors:
            if key.endswith(("embed_tokens.weight", "llm.embed.weight")):
                tensors[key][self.placeholders] = tensors[key][PLAIN].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    def ids(self, part: Part) -> list[int]:
        """The tokens of a part of a prompt. GLM-5.3 knows the frames of a video by the tokens around them."""
        if isinstance(part, int):
            return [part]
        if not part.num_frames:
            return self.placeholders[:1]
        video = self.placeholders[1:]
        around = GLM_TOP["video_start_token_id"], GLM_TOP["video_end_token_id"]
        return [around[0], *video, around[1]] if self.arch == GLM else video

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """``[len(tokens), V]``: after each token of ``Tokens``."""
        media = tokens.media if isinstance(tokens, Tokens) else []
        places = {i for item in media for start, n in item.placeholders for i in range(start, start + n)}
        ids = [PLAIN if t in self.placeholders and i not in places else t for i, t in enumerate(tokens)]
        return reference_logits(self._model, ids, media).float()


@dataclass
class ByModel:
    """Drafts what the reference would take, but for some."""

    reference: Reference
    rng: Any

    def propose(self, request: Request, count: int) -> list[int]:
        tokens = Tokens(request.known_token_ids, [], request.media)
        for _ in range(self.rng.randint(0, count)):
            wrong = self.rng.random() < 0.2
            tokens += [self.rng.randrange(VOCAB_SIZE) if wrong else int(self.reference.logits(tokens)[-1].argmax())]
        return tokens[len(request.known_token_ids) :]


@dataclass
class Episode(fuzz_engine.Episode):
    """``pictures``: those of this episode, few, so that they come again."""

    pictures: list[Picture] = field(default_factory=list)
    num_pictures: int = 0
    num_encoder_hits: int = 0

    def _settings(self) -> dict[str, Any]:
        rng, settings = self.rng, super()._settings()
        step, arch = rng.choice([6, 16, 40]), self._reference.arch
        if arch in (INDEXED, GLM) and settings["page_size"] == 1:  # four tokens have one pooled key
            settings["page_size"], settings["num_kv_pages"] = 4, 1 + -(-(settings["num_kv_pages"] - 1) // 4)
        settings["max_num_encoder_input_tokens"] = step
        settings["encoder_cache_size"] = step + rng.choice([0, 1, step // 2, 3 * step])
        if settings["cuda_graph_mode"] != "NONE":
            most = step if arch == INKLING else 4 * step
            settings["encoder_cuda_graph_patches"] = rng.choice([[0], [most], [8, most]])
        sides, lengths = [8, 16, 24, 32, 40], [0] if arch in IMAGES_ALONE else [0, 0, 0, 1, 2, 3]
        self.pictures = [
            Picture(rng.choice(sides), rng.choice(sides), rng.randrange(2), rng.choice(lengths)) for _ in range(5)
        ]
        return settings

    @property
    def _reference(self) -> Reference:
        return cast(Reference, self.reference)

    def _params(self, tokens: list[int]) -> SamplingParams:
        params = super()._params(tokens)
        if self._reference.are_silent and params.structured_outputs is None:
            never = dict.fromkeys(self._reference.placeholders, -100.0)
            params = replace(params, logit_bias=(params.logit_bias or {}) | never)
        return params

    def _mostly_right(self) -> Any:
        return ByModel(self._reference, self.rng)

    def _send(self) -> None:
        rng, name = self.rng, f"r{len(self.sent)}"
        base = rng.choice(self.corpus)
        parts: list[Part] = list(base.parts if isinstance(base, Tokens) else _texts(base))
        parts = parts[: rng.randint(0, min(len(parts), self.context // 2))]
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            apart = isinstance(parts[-1], Picture) if parts else False  # the reference takes two in a row for one
            parts += [PLAIN, rng.choice(self.pictures)] if apart or rng.random() < 0.8 else [rng.choice(self.pictures)]
            parts += _texts(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 1, 2, 9])))
        prompt, tokens = self._fitting(parts or [5 + PLAIN])
        params = self._params(tokens)
        if rng.random() < 0.4:
            places = range(1, len(prompt["prompt_token_ids"]) + 1)
            prompt["checkpoint_positions"] = sorted(rng.sample(places, min(len(places), rng.randint(0, 3))))
        if rng.random() < 0.15:
            prompt["cache_salt"] = rng.choice("ab")
        self.sent[name] = Sent(tokens, params)
        self.num_pictures += len(tokens.media)
        self.llm.add_request(prompt, params, request_id=name, priority=rng.randint(0, 2))

    def _fitting(self, parts: list[Part]) -> tuple[dict[str, Any], Tokens]:
        """A prompt of as many of these parts as fit, and its tokens."""
        while True:
            shown = [part for part in parts if isinstance(part, Picture)]
            ids = [token for part in parts for token in self._reference.ids(part)]
            media = {"image": [p.source() for p in shown if not p.num_frames]}
            media["video"] = [p.source() for p in shown if p.num_frames]
            prompt: dict[str, Any] = {"prompt_token_ids": ids}
            prompt["multi_modal_data"] = {kind: sources for kind, sources in media.items() if sources}
            try:
                prepared = self.llm._inputs.prepare_prompt(prompt)
            except RequestError:
                parts = parts[: len(parts) // 2] or [PLAIN]
                continue
            return prompt, Tokens(prepared.token_ids, parts, prepared.media)

    def _ended(self, output: Any) -> None:
        super()._ended(output)
        self.num_encoder_hits = self.llm.stats().num_encoder_hits
        encoder = self.llm._core.scheduler.encoder
        assert encoder is not None
        encoder.check()

    def figures(self) -> Counter[str]:
        more = {"pictures": self.num_pictures, "encoder_hits": self.num_encoder_hits}
        return super().figures() + Counter(more)


def references(folder: Path, names: Sequence[str] = MODELS) -> dict[str, Any]:
    """Make the references of ``Episode``, by name."""
    return {name: Reference(name, folder / str(i)) for i, name in enumerate(names)}


def main(arguments: list[str] | None = None) -> int:
    description = "random traffic with images, against transformers"
    return fuzz_engine.run_for(30, description, references, Episode, arguments)


if __name__ == "__main__":
    sys.exit(main())
