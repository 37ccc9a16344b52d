"""Expansion of a prompt's placeholders.

A prompt has one placeholder token per image or video. Expansion inserts as many as the encoder has embeddings, and the
timestamps of videos.

The inserted tokens are between two special tokens (``<|vision_start|>`` and ``<|vision_end|>``, for example), so the
tokens around them do not change.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from weft.config.vision import VisionConfig
from weft.errors import RequestError
from weft.multimodal.items import MediaItem, Modality
from weft.multimodal.patch_maker import Processed
from weft.multimodal.rules import RULES

Encode = Callable[[str], list[int]]
"""Encodes a text without special tokens."""


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """An expanded prompt. ``positions``: the new places of the given positions. ``media``: items in the order of
    placeholders."""

    token_ids: list[int]
    positions: list[int]
    media: list[MediaItem]


def check_placeholders(token_ids: Sequence[int], vision: VisionConfig, given: dict[Modality, int], param: str) -> None:
    """Raise RequestError unless a prompt has one placeholder for each of its images and videos."""
    wanted = {"image": vision.tokens.image, "video": vision.tokens.video}
    for modality, token in wanted.items():
        if token is None:
            continue
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
    """Insert as many placeholders as each item needs.

    Args:
        token_ids: token ids with one placeholder per item, in the order of ``processed`` within each modality.
        positions: ascending positions in ``token_ids`` to convert.
        encode: encodes the timestamps of videos; None without a tokenizer.

    Raises:
        RequestError: placeholders and items do not match.
    """
    count: dict[Modality, int] = {"image": 0, "video": 0}
    for item in processed:
        count[item.modality] += 1
    check_placeholders(token_ids, vision, count, param)
    waiting: dict[int | None, Iterator[Processed]] = {
        vision.tokens.image: (item for item in processed if item.modality == "image"),
        vision.tokens.video: (item for item in processed if item.modality == "video"),
    }
    ids: list[int] = []
    media: list[MediaItem] = []
    starts: list[int] = []  # new position of each token of the given prompt
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
    num_tokens, tokens = vision.num_tokens(item.grid), vision.tokens
    runs: list[tuple[int, int]] = []
    if item.times is None:
        runs.append((len(ids), num_tokens))
        ids += [tokens.image] * num_tokens
    else:
        if encode is None:
            raise RequestError("videos need the tokenizer for their timestamps, but skip_tokenizer_init=True", param)
        length, rules = num_tokens // len(item.times), RULES[vision.processor].video
        assert rules is not None and tokens.video is not None and tokens.start is not None and tokens.end is not None
        placeholder = tokens.video if rules.frame_placeholder == "video" else tokens.image
        forms = rules.time_before, rules.time_after
        for seconds in item.times:
            before, after = (encode(form.format(seconds)) if form else [] for form in forms)
            ids += [*before, tokens.start]
            runs.append((len(ids), length))
            ids += [placeholder] * length + [tokens.end, *after]
    return MediaItem(item.modality, item.content_hash, runs, item.grid, item.pixel_values, item.dtype)
