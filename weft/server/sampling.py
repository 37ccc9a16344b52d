"""From the fields of an API request to ``SamplingParams``.

Names, units and limits of the API, and its own defaults; what depends on the model is checked elsewhere.
"""

from typing import Any

from weft.errors import RequestError
from weft.sampling_params import SamplingParams
from weft.server.protocol import ChatCompletionRequest, CompletionRequest, SamplingFields
from weft.server.settings import ServerSettings

COMPLETION_MAX_TOKENS = 16
"""Tokens that ``/v1/completions`` generates by default, as in the OpenAI API."""

_SAME_NAME = {*SamplingFields.__struct_fields__} & {*SamplingParams.__struct_fields__} - {
    "logit_bias", "max_tokens", "stop", "structured_outputs",
}  # fmt: skip
"""Fields that are taken over as they are."""

_MOST = {"bad_words": 512, "allowed_token_ids": 1 << 18, "logit_bias": 1 << 18}
"""Most entries of lists that are checked one by one in the event loop."""


def completion_params(request: CompletionRequest, settings: ServerSettings) -> SamplingParams:
    """Raises RequestError, as does ``chat_params``."""
    _check_completion(request)
    given = _shared(request, settings)
    max_tokens = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    # With echo, no new token at all may be asked for; the engine needs one, which is then not shown.
    given["max_tokens"] = 1 if max_tokens == 0 and request.echo else max_tokens
    if request.logprobs is not None:
        given["logprobs"] = request.logprobs
        if request.echo:  # compute enough for both fields; each field shows as many as it asked for
            numbers = {request.logprobs, given.get("prompt_logprobs", request.logprobs)}
            given["prompt_logprobs"] = min(numbers) if min(numbers) < 0 else max(numbers)  # -1: all
    return SamplingParams(**given)


def _check_completion(request: CompletionRequest) -> None:
    if request.suffix:
        raise RequestError("suffix is not supported; leave it out", "suffix")
    if request.best_of not in (None, 1) and request.best_of != request.n:
        raise RequestError(f"best_of={request.best_of} is not supported; use n and choose among the answers", "best_of")
    if request.echo and request.stream and request.logprobs is not None:
        raise RequestError("echo with logprobs cannot be streamed; set stream=false", "stream")


def chat_params(request: ChatCompletionRequest, settings: ServerSettings) -> SamplingParams:
    given = _shared(request, settings)
    for name in ("max_tokens", "max_completion_tokens"):
        if (value := getattr(request, name)) is not None:
            given["max_tokens"] = value
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
    if request.logprobs:
        given["logprobs"] = request.top_logprobs or 0
    return SamplingParams(**given)


def _shared(request: SamplingFields, settings: ServerSettings) -> dict[str, Any]:
    given = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    if request.n is not None and request.n > settings.max_n:
        raise RequestError(f"n={request.n} is more than this server allows: {settings.max_n}", "n")
    for name, most in _MOST.items():
        size = len(getattr(request, name) or ())
        if size > most:
            raise RequestError(f"{name} has {size:,} entries; this server takes {most:,}", name)
    for name in ("priority", "min_tokens", "top_k"):
        _check_size(name, getattr(request, name))
    if request.stop:
        given["stop"] = request.stop
    if request.logit_bias:
        given["logit_bias"] = _by_token_id(request.logit_bias)
    if request.truncation_side not in (None, "left"):
        raise RequestError(
            f"truncation_side={request.truncation_side[:40]!r} is not supported: the end of a prompt is kept, which is "
            "'left'",
            "truncation_side",
        )
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("prompt_logprobs cannot be streamed; set stream=false", "prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is for stream=true; leave it out", "stream_options")
    return given


def _check_size(name: str, value: int | None) -> None:
    """Numbers without a range of their own must fit into 32 bits, so that they can be sent to the engine."""
    if value is not None and not -(2**31) <= value < 2**31:
        raise RequestError(f"{name}={str(value)[:30]} is out of range; allowed are 32-bit integers", name)


def names_ids(request: SamplingFields, settings: ServerSettings) -> bool:
    """True if log probabilities name tokens by their ids."""
    wanted = request.return_tokens_as_token_ids
    return settings.return_tokens_as_token_ids if wanted is None else wanted


def _by_token_id(logit_bias: dict[str, float]) -> dict[int, float]:
    """JSON has texts as keys. All that are no token ids are named in the error, as far as there is room."""
    wrong = [key for key in logit_bias if not (key.isascii() and key.isdigit() and len(key) < 12)]
    if wrong:
        keys = ", ".join(repr(key[:40]) for key in wrong[:5]) + (", …" if len(wrong) > 5 else "")
        raise RequestError(f'logit_bias has the keys {keys}; keys are token ids, such as "42"', "logit_bias")
    return {int(key): bias for key, bias in logit_bias.items()}
