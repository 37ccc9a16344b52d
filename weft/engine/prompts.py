"""Prompts: the forms that users give, and the form that the engine accepts."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta, ValidationError, convert

from weft.errors import RequestError
from weft.multimodal.items import MediaItem
from weft.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]

PROMPT_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data", "checkpoint_positions", "cache_salt")


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt as text (if given as text) and as token ids, with hints for the prefix cache.

    ``media``: its images and videos, whose placeholders are in ``token_ids``.
    """

    text: str | None
    token_ids: list[int]
    checkpoint_positions: list[int] = field(default_factory=list)
    cache_salt: str | None = None
    media: list[MediaItem] = field(default_factory=list)

    @property
    def num_media_tokens(self) -> int:
        """Number of placeholder tokens of images and videos."""
        return sum(item.num_tokens for item in self.media)


def check_mapping(prompt: Mapping[str, Any]) -> str | None:
    """Check a prompt given as a dict. Returns its cache salt. Raises RequestError for an unknown key or an invalid
    salt."""
    unknown = [key for key in prompt if key not in PROMPT_KEYS]
    if unknown:
        raise RequestError(f"prompt has unknown keys {unknown}; allowed are {list(PROMPT_KEYS)}", "prompt")
    salt = prompt.get("cache_salt")
    if salt is not None:
        check_text("cache_salt", salt)
    return salt


def check_text(name: str, value: Any) -> None:
    """Raise RequestError unless ``value`` is a non-empty text that can be sent to another process."""
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name}={value!r} is not a non-empty text", name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name}={value!r} is not valid Unicode at character {error.start}", name) from None


def check_positions(positions: Any, num_tokens: int) -> list[int]:
    """The checkpoint positions in ascending order, without duplicates."""
    name = "checkpoint_positions"
    if positions is None:
        return []
    if isinstance(positions, (str, bytes)) or not isinstance(positions, Sequence):
        raise RequestError(f"{name} is a {type(positions).__name__}; it must be a list of integers", name)
    for position in positions:
        if type(position) is not int or not 0 < position <= num_tokens:
            raise RequestError(
                f"{name} holds {position!r}; a position is a number of leading tokens, here 1 to {num_tokens}", name
            )
    return sorted(set(positions))


def check_call(params: SamplingParams | None, request_id: str | None, priority: int) -> SamplingParams:
    """Return the sampling parameters of a call, or the defaults. Raises RequestError for another type, or for values
    that cannot be sent to another process. The result is a copy, because the caller may assign fields later."""
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params is a {type(params).__name__}; give SamplingParams", "sampling_params")
    if request_id is not None:
        check_text("request_id", request_id)
    if type(priority) is not int or not -(2**63) <= priority < 2**63:
        raise RequestError(f"priority={priority!r} is not a 64-bit integer; smaller ones go first", "priority")
    return params.clone()


def check_token_ids(name: str, ids: Any, vocab_size: int) -> list[int]:
    """Return a copy of the caller's token ids. Raises RequestError if they are no list of ids of the vocabulary."""
    if isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Sequence):
        raise RequestError(f"{name} is a {type(ids).__name__}; it must be a list of integers", name)
    ids = ids if isinstance(ids, list) else list(ids)
    try:
        return convert(ids, _token_ids(vocab_size))
    except (ValidationError, UnicodeEncodeError):  # half a surrogate pair raises the second error
        others = [token for token in ids if isinstance(token, bool) or not isinstance(token, int)]
    if others:
        raise RequestError(f"{name} holds {others[0]!r}; every entry must be an integer", name)
    wrong = next(token for token in ids if not 0 <= token < vocab_size)
    raise RequestError(f"{name} holds {wrong}; the vocabulary has {vocab_size} ids, 0 to {vocab_size - 1}", name)


@functools.cache
def _token_ids(vocab_size: int) -> Any:
    """Return the type of a list of token ids."""
    return list[Annotated[int, Meta(ge=0, lt=vocab_size)]]


def as_list(prompts: Any) -> list[Prompt]:
    """Return the prompts as a list. A text, a dict or a list of token ids is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; give a text, token ids, a dict, or a list of those", "prompts"
        )
    is_single = len(prompts) > 0 and all(isinstance(p, int) for p in prompts)
    return [prompts] if is_single else list(prompts)


def per_prompt(name: str, value: Any, kind: type, count: int) -> list[Any]:
    if isinstance(value, kind):
        return [value] * count
    remedy = "give one for all prompts, or a list with one per prompt"
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"{name} is a {type(value).__name__}, not {kind.__name__}; {remedy}", name)
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts; {remedy}", name)
    wrong = [v for v in value if not isinstance(v, kind)]
    if wrong:
        raise RequestError(f"{name} holds a {type(wrong[0]).__name__}, not {kind.__name__}; {remedy}", name)
    return list(value)


def refuse_lora(lora_request: Any) -> None:
    """Raise RequestError unless ``lora_request`` is None, as in scripts for vLLM that use no adapter."""
    if lora_request is not None:
        raise RequestError(
            "lora_request is given, but LoRA is not supported; merge the adapter into the checkpoint", "lora_request"
        )
