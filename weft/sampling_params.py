"""``SamplingParams``: fields, limits, validation.

Job: one validated value object. Owns: ranges and defaults. Does not know: tokenizers, vocabularies or tensors. Checks
that depend on those (stop strings, bad words, token ids in range) are made where the request is accepted.
"""

from __future__ import annotations

import difflib
import math
from copy import copy
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from weft.errors import RequestError

MAX_STOPS = 16

GREEDY_BELOW = 1e-5
"""Temperatures below this count as greedy. Dividing by them would overflow before it changed what is sampled."""


LONGEST_BAD_WORD = 1000
"""Upper bound on characters of a bad word. Every step compares all beginnings of bad words with the latest tokens."""

SMALLEST_REPETITION_PENALTY = 1e-6
"""Lower bound on the penalty. Logits divided by less leave the range of float32."""

_LARGEST_INTEGER = 2**63 - 1
_NOT_IN_WEFT = frozenset(
    {
        "extra_args", "logprob_token_ids", "repetition_detection", "thinking_token_budget",
        "spaces_between_special_tokens", "skip_clone", "skip_reading_prefix_cache", "routed_experts_prompt_start",
    }
)  # fmt: skip
"""Parameters of vLLM's ``SamplingParams`` that Weft lacks."""


class _Parameters(type(msgspec.Struct)):  # type: ignore[misc]
    """A base class that refuses unknown parameter names as it refuses values."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        try:
            return super().__call__(*args, **given)
        except TypeError as error:
            raise _unknown(cls, args, given, error) from None


class StructuredOutputsParams(
    msgspec.Struct, metaclass=_Parameters, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A constraint on the form of the text; names and meanings as in vLLM. Exactly one field is given.

    Attributes:
        json: a JSON schema, as a dict or as text.
        regex: a regular expression in the syntax of Rust's regex crate, without look-around, on one line.
        choice: a list of texts, one of which is generated.
        grammar: a grammar in llguidance's Lark format.
        json_object: True for any JSON object.
    """

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {' and '.join(given) or 'no constraint'}; "
                f"give exactly one of {', '.join(self.__struct_fields__)}",
                "structured_outputs",
            )
        kinds, what = _FORMS[given[0]]
        value: Any = getattr(self, given[0])
        texts = value if given[0] == "choice" and isinstance(value, (list, tuple)) else ()
        if not isinstance(value, kinds) or not all(isinstance(text, str) for text in texts):
            raise RequestError(f"structured_outputs has {given[0]}={value!r}; it must be {what}", "structured_outputs")


_FORMS: dict[str, tuple[tuple[type, ...], str]] = {
    "json": ((dict, str, bool), "a JSON schema: a dict, or its text"),
    "regex": ((str,), "a text"),
    "choice": ((list, tuple), "a list of texts"),
    "grammar": ((str,), "a text"),
    "json_object": ((bool,), "True or False"),
}


class RequestOutputKind(Enum):
    """Contents of each output of a request: all tokens so far, the new tokens, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, metaclass=_Parameters, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of one request; names and meanings as in vLLM and the OpenAI API.

    ``None`` for ``temperature``, ``top_k``, ``top_p``, ``min_p`` and ``repetition_penalty`` means the value in the
    checkpoint's ``generation_config.json``. Without one it means 1.0, off, 1.0, 0.0 and 1.0.

    Attributes:
        n: completions per prompt.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches it (after top_k), in (0, 1].
        min_p: drop tokens below this share of the most likely token's probability, in [0, 1].
        presence_penalty, frequency_penalty: in [-2, 2], over generated tokens (OpenAI).
        repetition_penalty: in [1e-6, 100], over prompt and generated tokens (CTRL, arXiv 1909.05858).
        logit_bias: token id -> value added to its logit, in [-100, 100].
        allowed_token_ids: the only tokens that may be generated.
        bad_words: texts that must not be generated, tokenized as at the start of a text and as after a space.
        seed: any 64-bit integer. The sample depends on (seed, output position, token id) alone. The default is derived
            from the engine's seed and the request's number.
        stop: strings that end the generation. They are cut off unless ``include_stop_str_in_output``.
        stop_token_ids: token ids that end the generation, like the checkpoint's EOS ids. Their text is dropped with the
            special tokens, and kept if ``include_stop_str_in_output``.
        max_tokens: upper bound on generated tokens; None: the checkpoint's ``max_new_tokens``, else the room in the
            context.
        min_tokens: number of tokens before which no EOS, stop token or stop string counts.
        ignore_eos: EOS ids, the checkpoint's and its tokenizer's, do not end the generation.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: False for token ids only, without text (and so without stop strings).
        logprobs: report the log probabilities of the sampled token and of the N most likely tokens, at most
            ``EngineConfig.max_logprobs``. 0 reports the sampled token only, -1 the whole vocabulary.
        prompt_logprobs: the same for every prompt token.
        structured_outputs: a constraint on the form of the text, which decides where it ends.
        logits_processors: callables ``(output_token_ids, logits)`` or ``(prompt_token_ids, output_token_ids, logits)``
            that return the logits to sample from, ``[vocab_size]`` float32 on the model's device. They are called in
            order, before penalties and masks, in ``LLM`` with one process only. They are slow: the request's next step
            waits for each token (no overlap), and its row is sampled outside of CUDA graphs, after one Python call per
            processor.
        truncate_prompt_tokens: keep only the last tokens of the prompt, this many; -1: as many as leave room for
            ``max_tokens`` (for one token if that is None).
        output_kind: what ``step`` and ``AsyncLLM.generate`` return. ``LLM.generate`` returns whole outputs.

    A field can be assigned; the engine keeps the values that a request was added with.
    """

    n: int = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: list[Any] | None = None
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def clone(self) -> SamplingParams:
        """Return a copy, whose fields can be assigned without an effect on this object."""
        return copy(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a field. Raises RequestError, and changes nothing, if the value is not valid."""
        if name not in self.__struct_fields__:
            raise _unknown(type(self), (), {name: value}, TypeError(name))
        before = getattr(self, name)
        super().__setattr__(name, value)
        try:
            self.__post_init__()
        except RequestError:
            super().__setattr__(name, before)
            raise

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_flags()
        self._check_stops()
        self._check_token_lists()
        self._check_structure()
        if self.logits_processors is not None:
            _list("logits_processors", self.logits_processors, "callables")
            for processor in self.logits_processors:
                if not callable(processor):
                    raise RequestError(
                        f"logits_processors holds {processor!r}, which is not callable", "logits_processors"
                    )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(f"output_kind={self.output_kind!r} is no RequestOutputKind", "output_kind")

    def _check_numbers(self) -> None:
        _integer("n", self.n, 1, 64)
        _integer("max_tokens", self.max_tokens, 1, None, optional=True)
        _integer("min_tokens", self.min_tokens, 0, None)
        _integer("top_k", self.top_k, -1, None, optional=True)
        _integer("logprobs", self.logprobs, -1, None, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, -1, None, optional=True)
        _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, None, optional=True)
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens=0 leaves no prompt; allowed are 1 or more, and -1", "truncate_prompt_tokens"
            )
        _integer("seed", self.seed, -(2**63), 2**64 - 1, optional=True)
        _number("temperature", self.temperature, 0.0, 100.0, optional=True)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True, optional=True)
        _number("min_p", self.min_p, 0.0, 1.0, optional=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, SMALLEST_REPETITION_PENALTY, 100.0, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is greater than max_tokens={self.max_tokens}; "
                "lower one or raise the other",
                "min_tokens",
            )

    def _check_flags(self) -> None:
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise RequestError(f"{name}={value!r} is not a truth value; give True or False", name)

    def _check_stops(self) -> None:
        if self.stop is not None and not isinstance(self.stop, str):
            _list("stop", self.stop, "texts")
        stops = self.stop_strings
        if len(stops) > MAX_STOPS:
            raise RequestError(f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed", "stop")
        for entry in stops:
            if not isinstance(entry, str) or not entry:
                raise RequestError(f"stop holds {entry!r}; every stop string needs at least one character", "stop")
        if stops and not self.detokenize:
            raise RequestError("stop strings need text: leave detokenize=True or use stop_token_ids", "stop")

    def _check_structure(self) -> None:
        name, given = "structured_outputs", self.structured_outputs
        if given is None:
            return
        if not isinstance(given, StructuredOutputsParams):
            raise RequestError(f"{name} is a {type(given).__name__}; give StructuredOutputsParams", name)
        for other in ("min_tokens", "ignore_eos"):
            if getattr(self, other):
                raise RequestError(f"{other} contradicts {name}, which decides where the text ends", other)

    def _check_token_lists(self) -> None:
        for name in ("allowed_token_ids", "stop_token_ids"):
            value = getattr(self, name)
            if value is None:
                continue
            _list(name, value, "token ids")
            if all(type(token) is int and token >= 0 for token in value):  # up to the size of the vocabulary
                continue
            for token in value:
                _integer(name, token, 0, None, what=f"{name} holds {token!r}; it")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is empty, so no token could be generated; leave it out or name some",
                "allowed_token_ids",
            )
        self._check_bias()
        if self.bad_words is not None:
            _list("bad_words", self.bad_words, "texts")
            for word in self.bad_words:
                if not isinstance(word, str) or not word.strip():
                    raise RequestError(f"bad_words holds {word!r}; every entry must be a non-empty text", "bad_words")
                if len(word) > LONGEST_BAD_WORD:
                    raise RequestError(
                        f"bad_words holds a text of {len(word):,} characters; at most {LONGEST_BAD_WORD:,} are allowed",
                        "bad_words",
                    )

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise RequestError(f"logit_bias={self.logit_bias!r} is not a dict of token id -> number", "logit_bias")
        items = self.logit_bias.items()
        if all(type(t) is int and t >= 0 and type(b) in (int, float) and -100 <= b <= 100 for t, b in items):
            return
        for token, bias in items:
            _integer("logit_bias", token, 0, None, what=f"logit_bias has the key {token!r}; it")
            _number("logit_bias", bias, -100.0, 100.0, what=f"logit_bias adds {bias!r} to token {token}; it")


def _unknown(cls: type, args: tuple[Any, ...], given: dict[str, Any], error: TypeError) -> Exception:
    """The error for a call with these arguments, which ended with ``error``."""
    names: tuple[str, ...] = cls.__struct_fields__  # type: ignore[attr-defined]
    if args:
        return RequestError(f"{cls.__name__} was given {args[0]!r} without a name; write {cls.__name__}({names[0]}=…)")
    name = next((name for name in given if name not in names), None)
    if name is None:
        return error
    close = difflib.get_close_matches(name, names, n=3)
    remedy = f"did you mean {' or '.join(close)}?" if close else f"allowed are {', '.join(names)}"
    if name in _NOT_IN_WEFT:
        remedy = "vLLM's, which this version of Weft does not have; leave it out"
    return RequestError(f"{cls.__name__} has no parameter {name!r} (given {given[name]!r}): {remedy}", name)


def _integer(name: str, value: Any, low: int, high: int | None, *, optional: bool = False, what: str = "") -> None:
    most = _LARGEST_INTEGER if high is None else high
    if (value is None and optional) or (type(value) is int and low <= value <= most):
        return
    what = what or f"{name}={value!r}"
    allowed = f"{low} or more, of at most 64 bits" if high is None else f"{low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{what} is not an integer; allowed are integers, {allowed}", name)
    if not low <= value <= most:
        raise RequestError(f"{what} is outside the allowed range: {allowed}", name)


def _number(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    optional: bool = False,
    what: str = "",
) -> None:
    if (value is None and optional) or (type(value) is float and low < value <= high):
        return
    what = what or f"{name}={value!r}"
    allowed = f"{'above' if open_low else 'from'} {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
        raise RequestError(f"{what} is not a finite number; allowed are numbers {allowed}", name)
    if value < low or value > high or (open_low and value == low):
        raise RequestError(f"{what} is outside the allowed range: {allowed}", name)


def _list(name: str, value: Any, of: str) -> None:
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"{name}={value!r} is a {type(value).__name__}; give a list of {of}", name)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Find names that vLLM has in its module of this name."""
        import weft

        return weft.find_name(__name__, name)
