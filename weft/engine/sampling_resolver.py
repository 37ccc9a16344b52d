"""From ``SamplingParams`` to the parameters of a row, for one model.

Job: apply the checkpoint's defaults, encode bad words, convert grammars, and refuse what does not fit the model. Does
not know: prompts, requests, seeds.
"""

from typing import Any

from weft.config import EngineConfig
from weft.engine.prompts import check_token_ids
from weft.engine.structured_outputs import check_grammar, constraint_of_params
from weft.errors import RequestError
from weft.messages import RowSampling
from weft.sampling_params import SamplingParams
from weft.text.tokenizer import Tokenizer


class SamplingResolver:
    """Resolves sampling parameters. ``tokenizer``: None if the engine runs on token ids alone."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self._vocab_size = config.model_config.vocab_size
        self._generation = config.generation
        self._num_processes = config.tensor_parallel_size
        self._max_logprobs = config.max_logprobs
        self._reports_processed = config.logprobs_mode == "processed_logprobs"
        self._tokenizer = tokenizer
        self._eos = frozenset(config.eos_token_ids)

    def resolve(self, params: SamplingParams, grammar: str | None = None) -> RowSampling:
        """Resolve the parameters with the checkpoint's generation defaults; see ``SamplingParams``. ``InputProcessor``
        chooses the seed. Call it once for all prompts of a call, since it tokenizes bad words.

        Args:
            grammar: a grammar that is known to compile, instead of ``params.structured_outputs``.

        Raises:
            RequestError: the parameters do not fit this model.
        """
        self._check_params(params)
        if self._reports_processed and params.logits_processors and params.logprobs is not None:
            raise RequestError(
                "logprobs with logits_processors need logprobs_mode='raw_logprobs', since processors run once",
                "logprobs",
            )
        defaults = self._generation
        top_k = int(_first(params.top_k, defaults.top_k, 0))
        sampling = RowSampling(
            temperature=float(_first(params.temperature, defaults.temperature, 1.0)),
            top_k=top_k if 0 < top_k < self._vocab_size else 0,
            top_p=float(_first(params.top_p, defaults.top_p, 1.0)),
            min_p=float(_first(params.min_p, defaults.min_p, 0.0)),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            repetition_penalty=float(_first(params.repetition_penalty, defaults.repetition_penalty, 1.0)),
            logit_bias=params.logit_bias or None,
            allowed_token_ids=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
            bad_words=self._bad_words(params),
            min_tokens=params.min_tokens,
            blocked_before_min=sorted(self._ends(params)) if params.min_tokens else [],
            logprobs=self.num_logprobs("logprobs", params.logprobs),
            prompt_logprobs=self.num_logprobs("prompt_logprobs", params.prompt_logprobs),
            grammar=self._grammar(params) if grammar is None else grammar,
        )
        _check_allowed(sampling)
        return sampling

    def num_logprobs(self, name: str, wanted: int | None) -> int | None:
        """The number of alternatives per token; -1 asks for the vocabulary. Raises RequestError if the number is too
        large."""
        if wanted is None:
            return None
        number = self._vocab_size if wanted == -1 else wanted
        limit = self._vocab_size if self._max_logprobs == -1 else min(self._max_logprobs, self._vocab_size)
        if number > limit:
            raise RequestError(
                f"{name}={wanted} is more than the {limit} log probabilities per token that are allowed; ask for "
                "fewer, or raise max_logprobs (-1: the whole vocabulary)",
                name,
            )
        return number

    def _is_token(self, token: int) -> bool:
        """Whether the model has a logit of the id. Checkpoints may name ids, and tokenizers may have tokens, beyond
        those."""
        return token < self._vocab_size

    def _ends(self, params: SamplingParams) -> set[int]:
        """Token ids that end the generation."""
        return set(params.stop_token_ids or ()) | (set() if params.ignore_eos else self._eos)

    def _bad_words(self, params: SamplingParams) -> list[list[int]] | None:
        """The token ids of each bad word, at the start of a text and after a space. Suppressed tokens are included."""
        suppressed = [[token] for token in self._generation.suppress_tokens if self._is_token(token)]
        if not params.bad_words:
            return suppressed or None
        if self._tokenizer is None:
            raise RequestError(
                "bad_words are texts and need the tokenizer, but skip_tokenizer_init=True; use a logit_bias of -100",
                "bad_words",
            )
        forms = [form for word in params.bad_words for form in (word, f" {word.strip()}")]
        encoded = [tuple(self._tokenizer.encode(form, add_special_tokens=False)) for form in forms]
        return suppressed + [list(ids) for ids in dict.fromkeys(encoded) if ids and all(map(self._is_token, ids))]

    def _grammar(self, params: SamplingParams) -> str | None:
        if params.structured_outputs is None:
            return None
        constraint = constraint_of_params(params.structured_outputs)
        if self._tokenizer is None:
            raise RequestError(
                f"{constraint.param} need the tokenizer, but skip_tokenizer_init=True; leave one of them out",
                constraint.param,
            )
        grammar = constraint.grammar()
        check_grammar(grammar, constraint.param)
        return grammar

    def _check_params(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if given := getattr(params, name):
                check_token_ids(name, list(given), self._vocab_size)
        if params.logits_processors and self._num_processes > 1:
            raise RequestError(
                "logits_processors run in the process of the model, but tensor_parallel_size="
                f"{self._num_processes} uses several; use logit_bias, bad_words or structured_outputs",
                "logits_processors",
            )
        if params.stop_strings and self._tokenizer is None:
            raise RequestError(
                "stop strings need the tokenizer, but skip_tokenizer_init=True; use stop_token_ids", "stop"
            )


def _check_allowed(sampling: RowSampling) -> None:
    """Refuse parameters that leave no token to generate."""
    if sampling.allowed_token_ids is None:
        return
    single_bad_words = (word[0] for word in sampling.bad_words or [] if len(word) == 1)
    if not set(sampling.allowed_token_ids).difference(sampling.blocked_before_min, single_bad_words):
        raise RequestError(
            f"allowed_token_ids={sampling.allowed_token_ids} are all ruled out, by min_tokens (ends of the generation) "
            "or bad_words, so no token could be generated; allow more, or lower min_tokens",
            "allowed_token_ids",
        )


def _first(*values: Any) -> Any:
    return next(v for v in values if v is not None)
