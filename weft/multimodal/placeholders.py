"""Placeholders of a prompt, and the items that stand for them.

A prompt with one placeholder token per image or video becomes the prompt with as many as the encoder gives embeddings,
timestamps of videos included.

What is put in stands between two special tokens (``<|vision_start|>`` and ``<|vision_end|>``), so token ids can be
rewritten as well as text: nothing around them is encoded differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from weft.config.vision import VisionConfig
from weft.errors import RequestError
from weft.multimodal.items import MediaItem, Modality
from weft.multimodal.processor import Processed

Encode = Callable[[str], list[int]]
"""Token ids of a text without special tokens."""


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """``positions``: what was a position of the prompt before; ``media``: in the order of their placeholders."""

    token_ids: list[int]
    positions: list[int]
    media: list[MediaItem]


def check_placeholders(token_ids: Sequence[int], vision: VisionConfig, given: dict[Modality, int], param: str) -> None:
    """Raises RequestError unless a prompt has one placeholder for each of its images and videos."""
    wanted = {"image": vision.tokens.image, "video": vision.tokens.video}
    for modality, token in wanted.items():
        found, number = token_ids.count(token), given.get(modality, 0)  # type: ignore[call-overload]
        if found != number:
            raise RequestError(
                f"the prompt has {found} {modality} placeholders (token {token}) and {number} {modality}s; write one "
                f"placeholder for each {modality}, as the chat template does, and none in texts",
                param,
            )


def expand(
    token_ids: Sequence[int],
    positions: Sequence[int],
    processed: Sequence[Processed],
    vision: VisionConfig,
    encode: Encode | None,
    param: str,
) -> ExpandedPrompt:
    """Put in as many placeholders as each item needs.

    Args:
        token_ids: with one placeholder each, images and videos in the order of ``processed`` within their modality.
        positions: ascending positions in ``token_ids`` that matter later.
        encode: for the timestamps of videos; None: there is no tokenizer.

    Raises:
        RequestError: placeholders and items do not match.
    """
    count: dict[Modality, int] = {"image": 0, "video": 0}
    for item in processed:
        count[item.modality] += 1
    check_placeholders(token_ids, vision, count, param)
    waiting: dict[int, Iterator[Processed]] = {
        vision.tokens.image: (item for item in processed if item.modality == "image"),
        vision.tokens.video: (item for item in processed if item.modality == "video"),
    }
    ids: list[int] = []
    media: list[MediaItem] = []
    starts: list[int] = []  # of each token of the given prompt, in the new one
    for token in token_ids:
        starts.append(len(ids))
        if token in waiting:
            media.append(_put_in(ids, next(waiting[token]), vision, encode, param))
        else:
            ids.append(token)
    starts.append(len(ids))
    return ExpandedPrompt(ids, [starts[position] for position in positions], media)


def _put_in(ids: list[int], item: Processed, vision: VisionConfig, encode: Encode | None, param: str) -> MediaItem:
    """Append an item's tokens."""
    num_tokens = vision.num_tokens(item.grid)
    runs: list[tuple[int, int]] = []
    if item.times is None:
        runs.append((len(ids), num_tokens))
        ids += [vision.tokens.image] * num_tokens
    else:
        if encode is None:
            raise RequestError("videos need the tokenizer for their timestamps, but skip_tokenizer_init=True", param)
        length = num_tokens // len(item.times)
        for seconds in item.times:
            ids += [*encode(f"<{seconds:.1f} seconds>"), vision.tokens.start]
            runs.append((len(ids), length))
            ids += [vision.tokens.video] * length + [vision.tokens.end]
    return MediaItem(item.modality, item.content_hash, runs, item.grid, item.pixel_values, item.dtype)
