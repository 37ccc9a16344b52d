"""From what a user asks for to requests that the scheduler can run.

Job: tokenize, validate, resolve sampling defaults, one ``Request`` per completion.
Owns: the checks of a request against this model (vocabulary, context length, tokenizer). Does not know: scheduling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config import EngineConfig
from weft.config.checkpoint import GenerationDefaults
from weft.errors import RequestError
from weft.messages import RowSampling
from weft.request import Request
from weft.sampling_params import SamplingParams
from weft.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]

PROMPT_KEYS = ("prompt", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt as text (if it came as text) and as token ids."""

    text: str | None
    token_ids: list[int]


class InputProcessor:
    """Validates and prepares requests for one model.

    Args:
        config: the resolved configuration.
        tokenizer: None if the engine runs on token ids alone.
        max_model_len: context length after clamping to the cache.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self._vocab_size = config.model_config.vocab_size
        self._generation: GenerationDefaults = config.generation
        self._seed = config.seed
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._num_requests = 0
        self._eos = frozenset(config.generation.eos_token_ids or config.model_config.eos_token_ids)

    # -- prompts -------------------------------------------------------------------------------------------------

    def prepare_prompt(self, prompt: Prompt) -> PreparedPrompt:
        """Token ids of a prompt given as text, token ids, or ``{"prompt": …}`` / ``{"prompt_token_ids": …}``.

        Raises:
            RequestError: empty, of the wrong type, too long, or with token ids outside the vocabulary.
        """
        if isinstance(prompt, str):
            prepared = PreparedPrompt(prompt, self._encode(prompt))
        elif isinstance(prompt, Mapping):
            prepared = self._prepare_mapping(prompt)
        else:
            prepared = PreparedPrompt(None, self._check_ids("prompt_token_ids", prompt))
        self._check_length(prepared.token_ids)
        return prepared

    def _prepare_mapping(self, prompt: Mapping[str, Any]) -> PreparedPrompt:
        unknown = sorted(set(prompt) - set(PROMPT_KEYS))
        if unknown:
            raise RequestError(f"prompt has unknown keys {unknown}; allowed are {list(PROMPT_KEYS)}", "prompt")
        if "prompt_token_ids" in prompt:
            text = prompt.get("prompt")
            return PreparedPrompt(text, self._check_ids("prompt_token_ids", prompt["prompt_token_ids"]))
        if not isinstance(prompt.get("prompt"), str):
            raise RequestError("a prompt given as a dict needs 'prompt' (text) or 'prompt_token_ids' (integers)", "prompt")
        return PreparedPrompt(prompt["prompt"], self._encode(prompt["prompt"]))

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise RequestError(
                "a text prompt needs the tokenizer, but skip_tokenizer_init=True; give prompt_token_ids instead", "prompt"
            )
        return self._tokenizer.encode(text)

    def _check_ids(self, name: str, ids: Any) -> list[int]:
        if isinstance(ids, (bytes, bytearray)) or not isinstance(ids, Sequence):
            raise RequestError(f"{name} is a {type(ids).__name__}; it must be a list of integers", name)
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(f"{name} holds {token!r}; every entry must be an integer", name)
            if not 0 <= token < self._vocab_size:
                raise RequestError(f"{name} holds {token}; the vocabulary has ids 0 to {self._vocab_size - 1}", name)
        return list(ids)

    def _check_length(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise RequestError("the prompt is empty; it needs at least one token", "prompt")
        if len(token_ids) >= self._max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; with a context of {self._max_model_len} tokens at most "
                f"{self._max_model_len - 1} are allowed, so that one can be generated; shorten it or raise max_model_len",
                "prompt",
            )

    # -- requests ------------------------------------------------------------------------------------------------

    def make_requests(
        self, request_id: str, prompt: PreparedPrompt, params: SamplingParams, priority: int = 0
    ) -> list[Request]:
        """One ``Request`` per completion; ``n > 1`` numbers the ids ``<id>/<index>``.

        Raises:
            RequestError: parameters that do not fit this model.
        """
        self._check_params(params)
        self._num_requests += 1
        seed = params.seed if params.seed is not None else derive_seed(self._seed, self._num_requests)
        ids = [request_id] if params.n == 1 else [f"{request_id}/{i}" for i in range(params.n)]
        return [self._make(name, prompt, params, _sample_seed(seed, i), priority) for i, name in enumerate(ids)]

    def _make(self, name: str, prompt: PreparedPrompt, params: SamplingParams, seed: int, priority: int) -> Request:
        room = self._max_model_len - len(prompt.token_ids)
        return Request(
            request_id=name,
            prompt_token_ids=prompt.token_ids,
            sampling=self._resolve(params, seed),
            max_tokens=min(params.max_tokens or room, room),
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            eos_token_ids=frozenset() if params.ignore_eos else self._eos,
            priority=priority,
        )

    def _resolve(self, params: SamplingParams, seed: int) -> RowSampling:
        """Fill in the checkpoint's generation defaults; see ``SamplingParams``."""
        defaults = self._generation
        ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else self._eos)
        return RowSampling(
            temperature=float(_first(params.temperature, defaults.temperature, 1.0)),
            top_k=max(0, int(_first(params.top_k, defaults.top_k, 0))),
            top_p=float(_first(params.top_p, defaults.top_p, 1.0)),
            min_p=float(_first(params.min_p, defaults.min_p, 0.0)),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            repetition_penalty=float(_first(params.repetition_penalty, defaults.repetition_penalty, 1.0)),
            logit_bias=params.logit_bias or None,
            allowed_token_ids=params.allowed_token_ids,
            bad_words=self._bad_words(params),
            seed=seed,
            min_tokens=params.min_tokens,
            blocked_before_min=sorted(ends) if params.min_tokens else [],
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        )

    def _bad_words(self, params: SamplingParams) -> list[list[int]] | None:
        """Each bad word as token ids, as it stands at the start of a text and after a space."""
        if not params.bad_words:
            return None
        if self._tokenizer is None:
            raise RequestError("bad_words are texts and need the tokenizer, but skip_tokenizer_init=True", "bad_words")
        encoded = (self._tokenizer.encode(form, add_special_tokens=False) for w in params.bad_words for form in (w, f" {w.strip()}"))
        return [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in encoded) if ids]

    def _check_params(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            self._check_ids(name, getattr(params, name) or [])
        self._check_ids("logit_bias", list(params.logit_bias or {}))
        if params.stop_strings and self._tokenizer is None:
            raise RequestError("stop strings need the tokenizer, but skip_tokenizer_init=True; use stop_token_ids", "stop")


def derive_seed(engine_seed: int, number: int) -> int:
    """The seed of a request that gave none: 64 bits that depend on the engine's seed and the request's number only."""
    digest = hashlib.blake2b(f"{engine_seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _sample_seed(seed: int, index: int) -> int:
    """The seed of completion ``index``: completion 0 has the request's own, so ``n`` does not change it."""
    seed %= 2**64
    return seed if index == 0 else derive_seed(seed, index)


def _first(*values: Any) -> Any:
    return next(v for v in values if v is not None)
