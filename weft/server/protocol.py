"""Request bodies of the OpenAI API: fields, decoding, validation.

Job: the fields of each request with their types, and their validation (msgspec).
Owns: names and types, including the fields of vLLM's API that go beyond OpenAI's. Does not know: the engine; what
depends on the model (ranges, vocabulary, length) is checked where the request is accepted.

Every field may be null, which means the same as leaving it out. ``NO_EFFECT`` are fields of OpenAI's API that do not
bear on the answer (accounting, storage, caching hints): they are known and have no effect here.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from weft.errors import RequestError
from weft.sampling_params import StructuredOutputsParams

logger = logging.getLogger(__name__)

NO_EFFECT = frozenset(
    "client_metadata context_management length_penalty metadata prediction prompt_cache_key prompt_cache_retention "
    "safety_identifier service_tier store user".split()
)


REFUSED = {
    "audio": "this model answers in text; leave it out",
    "chat_template": "templates are the checkpoint's; leave it out",
    "container": "this server runs no code; leave it out",
    "conversation": "this server stores no conversations; send their items as input",
    "documents": "put documents into messages",
    "ec_transfer_params": "this server takes no tensors from elsewhere; leave it out",
    "enable_response_messages": "answers have no other form here; leave it out",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "kv_transfer_params": "this server takes no tensors from elsewhere; leave it out",
    "logprob_token_ids": "use logprobs=-1, which --max-logprobs -1 allows",
    "logits_processors": "they cannot be sent; use logit_bias, bad_words or structured_outputs",
    "max_tool_calls": "this server runs no tools; count the calls that you answer",
    "mcp_servers": "this server calls no other servers; offer their tools as your own",
    "media_io_kwargs": "videos are read as frames, all of which are used; leave it out",
    "mm_processor_kwargs": "images are processed as the checkpoint says; leave it out, or send detail with an image",
    "modalities": "this model answers in text; leave it out",
    "previous_input_messages": "send the whole conversation as input",
    "prompt": "this server stores no prompts; send their text",
    "prompt_embeds": "send a text or token ids",
    "repetition_detection": "use repetition_penalty",
    "return_assistant_tokens_mask": "tokenize the messages with and without the answer and compare",
    "return_prompt_text": "use /tokenize and /detokenize",
    "return_token_offsets": "use /tokenize with return_token_strs",
    "spaces_between_special_tokens": "special tokens are joined as the tokenizer joins them; leave it out",
    "thinking_token_budget": "use max_tokens, reasoning_effort, or chat_template_kwargs with enable_thinking=false",
    "use_beam_search": "use n and temperature",
    "verbosity": "ask for it in a message",
    "vllm_xargs": "there is nothing here that reads it; leave it out",
    "web_search_options": "this server searches nothing; offer a tool of your own",
}
"""Fields of these APIs that would change the answer and are not served, and what to do instead. A model that declares a
field of the name reads it. The same names are refused inside of objects, such as ``text.verbosity``."""

_MATCHING: dict[str, tuple[Any, ...]] = {
    "modalities": (None, [], ["text"]),
    "spaces_between_special_tokens": (None, True),
    "verbosity": (None, "medium"),
}
"""Values of refused fields that match this server's behaviour. Any other refused field may have a false value."""


class StreamOptions(msgspec.Struct):
    """``include_usage``: a last chunk with the usage; ``continuous_usage_stats``: with that, usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct):
    """``type``: text, json_object, json_schema, or regex, ebnf and the like are under ``structured_outputs``."""

    type: str
    json_schema: dict[str, Any] | None = None


class CommonFields(msgspec.Struct, kw_only=True):
    """Fields of completions, chat completions and responses; see ``weft.sampling_params.SamplingParams``."""

    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputsParams | None = None


class SamplingFields(CommonFields, kw_only=True):
    """Fields of completions and chat completions."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    checkpoint_positions: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ExtraFields(CommonFields, kw_only=True):
    """Fields of chat completions that ``/v1/responses`` takes too, as vLLM's does."""

    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of ``/v1/completions``. ``prompt``: a text, token ids, a list of texts, or a list of lists of token ids."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """Body of ``/v1/chat/completions``."""

    messages: list[dict[str, Any]]
    echo: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``/tokenize``: a ``prompt``, or ``messages`` for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``/detokenize``."""

    tokens: list[int]
    model: str | None = None


Body = TypeVar("Body", bound=msgspec.Struct)


MAX_ENTRIES = 16_384
"""Most entries of a list of a body, and most parts of content of all its messages."""

_MAX_ENTRIES_OF = {"tools": 1_024, "prompt": 1 << 23, "tokens": 1 << 23, "allowed_token_ids": 1 << 18}
"""Lists with another bound. Token ids are bounded by the size of a body."""


class BodyReader:
    """Reads request bodies. ``strict``: an unknown field is an error; otherwise each is warned of once."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._warned: set[str] = set()
        self.unknown: list[str] = []
        """Unknown fields of the latest body."""

    def read(self, body: bytes, kind: type[Body]) -> Body:
        """``body`` as ``kind``.

        Raises:
            RequestError: the body is not JSON, or a field has the wrong type, is refused, or is unknown (``strict``).
        """
        fields = parse_object(body)
        self._check_names(fields, kind)
        _check_counts(fields)
        try:
            return msgspec.convert(_whole_numbers(fields, kind), kind)
        except msgspec.ValidationError as error:
            raise _type_error(error) from error
        except RecursionError as error:
            raise RequestError("the body is nested too deeply") from error

    def _check_names(self, fields: Mapping[str, Any], kind: type[Body]) -> None:
        unknown = list(_unknown_names(fields, kind))
        if unknown and self._strict:
            message = f"unknown field {unknown[0]!r}; leave it out (this server is strict)"
            raise RequestError(message, unknown[0].partition(".")[0])
        self.unknown = unknown
        self.warn(unknown)

    def warn(self, unknown: Iterable[str]) -> None:
        """Log unknown fields, each once."""
        for name in unknown:
            # Callers choose the names, so what is remembered and what is logged have a bound.
            if name not in self._warned and len(self._warned) < 100:
                self._warned.add(name)
                logger.warning("request field %.60r is not known and has no effect", name)


def _unknown_names(fields: Mapping[str, Any], kind: type[msgspec.Struct], where: str = "") -> Iterator[str]:
    """Yield the fields that ``kind`` does not declare, those of objects inside included. Raise RequestError for refused
    ones."""
    for name, value in fields.items():
        inner = _objects(kind).get(name)
        if inner is not None and isinstance(value, dict):
            yield from _unknown_names(value, inner, f"{where}{name}.")
        if name in kind.__struct_fields__ or (name in NO_EFFECT and not where):
            continue
        if name in REFUSED and (value not in _MATCHING[name] if name in _MATCHING else value):
            raise RequestError(f"{where}{name} is not supported: {REFUSED[name]}", f"{where}{name}".partition(".")[0])
        yield where + name


@cache
def _objects(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """Fields of ``kind`` that are objects with declared fields of their own."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        kinds = [
            each for each in (hint, *get_args(hint)) if isinstance(each, type) and issubclass(each, msgspec.Struct)
        ]
        if kinds and not kinds[0].__struct_config__.forbid_unknown_fields:
            found[name] = kinds[0]
    return found


def _check_counts(fields: Mapping[str, Any]) -> None:
    """Raise RequestError for lists with more entries than a body may have."""
    for name, entries in fields.items():
        if not isinstance(entries, list):
            continue
        most = _MAX_ENTRIES_OF.get(name, MAX_ENTRIES)
        if len(entries) > most:
            raise RequestError(f"{name[:60]} has {len(entries):,} entries; this server takes {most:,}", name[:60])
        if name not in ("messages", "input"):
            continue
        contents = [entry.get("content") for entry in entries if isinstance(entry, dict)]
        num_parts = sum(len(content) for content in contents if isinstance(content, list))
        if num_parts > MAX_ENTRIES:
            raise RequestError(f"{name} have {num_parts:,} parts of content; this server takes {MAX_ENTRIES:,}", name)


def _whole_numbers(fields: dict[str, Any], kind: type[Body]) -> dict[str, Any]:
    """JSON has one kind of number: ``2.0`` is fine where an integer is wanted."""
    floats = [name for name, value in fields.items() if type(value) is float and value.is_integer()]
    wanted = {name: int(fields[name]) for name in floats if name in _integer_fields(kind)}
    return fields | wanted if wanted else fields


@cache
def _integer_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    hints = get_type_hints(kind)
    return frozenset(name for name in kind.__struct_fields__ if hints[name] in (int, int | None))


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises RequestError for anything else."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object")
    return fields


def _type_error(error: msgspec.ValidationError) -> RequestError:
    """msgspec's message (``Expected `int`, got `str` - at `$.max_tokens```) with the field's name in front."""
    text = str(error)
    path = re.search(r" - at `\$\.?(.*?)`$", text)
    name = path.group(1) if path and path.group(1) else None
    missing = re.search(r"required field `(\w+)`", text)
    if missing:
        name = missing.group(1)
        return RequestError(f"{name} is missing; the request needs it", name)
    text = text[: path.start()] if path else text
    return RequestError(f"{name}: {text}" if name else text, re.split(r"[.\[]", name)[0] if name else None)
