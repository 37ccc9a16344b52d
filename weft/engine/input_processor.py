"""The input processor: from a user's prompts to requests for the scheduler.

Job: tokenize and validate prompts, make one ``Request`` per completion. Owns: the checks of a prompt against this model
(vocabulary, context length, tokenizer). Does not know: scheduling, sampling parameters (``sampling_resolver.py``).
"""

import hashlib
import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from weft.config import EngineConfig
from weft.engine.chat_prompts import ChatPrompt
from weft.engine.prompts import PreparedPrompt, Prompt, check_mapping, check_positions, check_token_ids
from weft.engine.sampling_resolver import SamplingResolver
from weft.errors import ContextLengthError, RequestError
from weft.messages import RowSampling
from weft.multimodal.parts import Media, prompt_media
from weft.multimodal.patch_maker import Processed
from weft.multimodal.placeholders import ExpandedPrompt, check_placeholders, expand
from weft.multimodal.processor import MediaProcessor
from weft.request import Request
from weft.sampling_params import SamplingParams
from weft.text.encoder import PIECE
from weft.text.tokenizer import Tokenizer


class InputProcessor:
    """Validates and prepares requests for one model.

    Args:
        config: the resolved configuration.
        tokenizer: None if the engine runs on token ids alone.
        max_model_len: context length after clamping to the cache.
        media: reads images and videos; None: the model reads text only.
        numbers: yields a number for each request and each prompt that is unique within the engine; None: from 0 on.
            Each of several processes before one engine has numbers of its own.

    Attributes:
        sampling: resolves sampling parameters.
        text_only: the reason why the model reads text only; None if it reads images.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        numbers: Iterator[int] | None = None,
        media: MediaProcessor | None = None,
    ) -> None:
        self._vocab_size = config.model_config.vocab_size
        self._max_new_tokens = config.generation.max_new_tokens
        self._seed = config.seed
        self._tokenizer = tokenizer
        self.sampling = SamplingResolver(config, tokenizer)
        self.media = media
        self.text_only = None if media is not None else config.reasons.get("language_model_only", "")
        self._max_model_len = max_model_len
        self._prompts = itertools.count(1) if numbers is None else numbers
        self._arrivals = itertools.count() if numbers is None else numbers
        self._eos = frozenset(config.eos_token_ids)

    def prepare_prompt(self, prompt: Prompt, params: SamplingParams | None = None) -> PreparedPrompt:
        """Encode a prompt given as text, token ids, or ``{"prompt": …}`` / ``{"prompt_token_ids": …}``, and cut it as
        ``params.truncate_prompt_tokens`` says.

        A dict may also have ``checkpoint_positions``, lengths of prefixes that later prompts are likely to share. Only
        prompts with the same ``cache_salt`` share cached prefixes. ``multi_modal_data``, ``{"image": [...], "video":
        [...]}``, has one item for each placeholder in the prompt (positions count an item as one token). Reading images
        takes a while; call this in a thread if that matters.

        Raises:
            RequestError: the prompt is empty, of the wrong type, too long, has token ids outside the vocabulary, or has
                an image that cannot be read.
        """
        if isinstance(prompt, str):
            prepared = PreparedPrompt(prompt, self.encode(prompt, params))
        elif isinstance(prompt, Mapping):
            prepared = self._prepare_mapping(prompt, params)
        else:
            prepared = PreparedPrompt(None, check_token_ids("prompt_token_ids", prompt, self._vocab_size))
        sources = prompt_media(prompt.get("multi_modal_data")) if isinstance(prompt, Mapping) else {}
        return self.fitted(self._with_sources(prepared, sources), params)

    def _with_sources(self, prompt: PreparedPrompt, sources: Media) -> PreparedPrompt:
        param = "multi_modal_data"
        if not sources:
            return prompt
        if self.media is None:
            raise RequestError(f"{param} is given; this model reads text only: {self.text_only}; leave it out", param)
        self.check_length(prompt.text, prompt.token_ids)
        processed = self.media.process(sources, self._max_model_len, param)
        expanded = self.with_media(prompt.token_ids, prompt.checkpoint_positions, processed, param)
        return PreparedPrompt(prompt.text, expanded.token_ids, expanded.positions, prompt.cache_salt, expanded.media)

    def with_media(
        self, token_ids: Sequence[int], positions: Sequence[int], processed: Sequence[Processed], param: str
    ) -> ExpandedPrompt:
        """Return the prompt with as many placeholders as its images and videos need, for a model that reads images.

        Raises:
            RequestError: placeholders and images do not match.
        """
        assert self.media is not None
        encode = self._tokenizer.encode if self._tokenizer is not None else None
        plain = partial(encode, add_special_tokens=False) if encode is not None else None
        return expand(token_ids, positions, processed, self.media.vision, plain, param)

    def encoded_chat(
        self, chat: ChatPrompt, positions: Sequence[int], cache_salt: str | None, params: SamplingParams
    ) -> PreparedPrompt:
        """Prepare a conversation that was rendered and encoded here. ``positions``: the caller's own checkpoint
        positions.

        Raises:
            RequestError: the prompt is too long, or a position is invalid.
        """
        own = check_positions(positions, len(chat.token_ids))
        known = sorted({*chat.turn_boundaries, *own}) if own else chat.turn_boundaries
        return self.fitted(PreparedPrompt(chat.text, chat.token_ids, known, cache_salt, chat.media), params)

    def fitted(self, prepared: PreparedPrompt, params: SamplingParams | None) -> PreparedPrompt:
        """Cut the prompt as ``params.truncate_prompt_tokens`` says. Raises RequestError if the prompt does not fit, or
        has a placeholder without an image."""
        if self.media is not None and not prepared.media:
            check_placeholders(prepared.token_ids, self.media.vision, {}, "prompt")
        if params is not None and params.truncate_prompt_tokens is not None:
            prepared = self._truncate(prepared, params.truncate_prompt_tokens, params.max_tokens or 1)
        self.check_length(prepared.text, prepared.token_ids)
        return prepared

    def _truncate(self, prompt: PreparedPrompt, keep: int, room: int) -> PreparedPrompt:
        """Keep the last ``keep`` tokens; with -1, as many as leave room for ``room`` more. The text is then decoded
        from them."""
        keep = max(1, self._max_model_len - room) if keep == -1 else keep
        cut = len(prompt.token_ids) - keep
        if cut <= 0:
            return prompt
        if prompt.media:
            raise RequestError(
                f"truncate_prompt_tokens would cut {cut} tokens off a prompt with images, which is not done; leave "
                "it out, or shorten the prompt",
                "truncate_prompt_tokens",
            )
        text, ids = prompt.text, prompt.token_ids[cut:]
        if text is not None and self._tokenizer is not None:
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
        positions = [position - cut for position in prompt.checkpoint_positions if position > cut]
        return PreparedPrompt(text, ids, positions, prompt.cache_salt)

    def _prepare_mapping(self, prompt: Mapping[str, Any], params: SamplingParams | None) -> PreparedPrompt:
        salt = check_mapping(prompt)
        text, token_ids = self._text_and_ids(prompt, params)
        positions = check_positions(prompt.get("checkpoint_positions"), len(token_ids))
        return PreparedPrompt(text, token_ids, positions, salt)

    def _text_and_ids(self, prompt: Mapping[str, Any], params: SamplingParams | None) -> tuple[str | None, list[int]]:
        if "prompt_token_ids" in prompt:
            text = prompt.get("prompt")
            if text is not None and not isinstance(text, str):
                raise RequestError(
                    f"prompt is a {type(text).__name__}; beside prompt_token_ids it must be text", "prompt"
                )
            return text, check_token_ids("prompt_token_ids", prompt["prompt_token_ids"], self._vocab_size)
        if not isinstance(prompt.get("prompt"), str):
            raise RequestError(
                "a prompt given as a dict needs 'prompt' (text) or 'prompt_token_ids' (integers)", "prompt"
            )
        return prompt["prompt"], self.encode(prompt["prompt"], params)

    def encode(self, text: str, params: SamplingParams | None, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a prompt. A prompt that is too long is encoded only as far as needed to know that. Raises
        RequestError."""
        if self._tokenizer is None:
            raise RequestError(
                "a text prompt needs the tokenizer, but skip_tokenizer_init=True; give prompt_token_ids instead",
                "prompt",
            )
        is_cut = params is not None and params.truncate_prompt_tokens is not None
        limit = None if is_cut else self._max_model_len
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, limit=limit)

    def check_length(self, text: str | None, token_ids: Sequence[int]) -> None:
        """Check the length of a prompt. A prompt with images is checked before they are read as well; if it is too
        long, its placeholders may not be encoded yet.

        Raises:
            RequestError: the prompt is empty.
            ContextLengthError: the prompt is too long. The message has the words by which OpenAI's and Anthropic's
                clients detect an overflow.
        """
        limit, num_tokens = self._max_model_len, len(token_ids)
        if not num_tokens:
            raise RequestError("the prompt is empty; it needs at least one token", "prompt")
        if num_tokens < limit:
            return
        at_least = "at least " if text is not None and len(text) > PIECE else ""
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens. However, the prompt is too long: "
            f"{at_least}{num_tokens} tokens > {limit - 1} maximum (one is left to be generated); shorten it, or raise "
            "max_model_len and the memory for the cache",
            "prompt",
        )

    def check_room(self, prompts: Sequence[PreparedPrompt], params: SamplingParams) -> None:
        """Raise ContextLengthError if a prompt and ``max_tokens`` together are longer than the context. Without this
        check the context ends the text."""
        longest = max(len(prompt.token_ids) for prompt in prompts)
        wanted, limit = params.max_tokens or 1, self._max_model_len
        if longest + wanted > limit:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens. However, max_tokens={wanted} and a prompt of "
                f"{longest} tokens are {longest + wanted}; ask for {limit - longest} or fewer, or leave max_tokens out",
                "max_tokens",
            )

    def make_requests(
        self,
        request_id: str,
        prompt: PreparedPrompt,
        params: SamplingParams,
        resolved: RowSampling,
        priority: int = 0,
        *,
        caller: str = "",
    ) -> list[Request]:
        """Make one ``Request`` per completion, with unique ids: ``<request_id>/<arrival>``.

        Args:
            resolved: ``params``, resolved by ``sampling``.
            caller: see ``RequestSpec``.
        """
        number = next(self._prompts)
        seed = params.seed if params.seed is not None else derive_seed(self._seed, number)
        samplings = [replace(resolved, seed=_sample_seed(seed, i)) for i in range(params.n)]
        ids = array("I", prompt.token_ids)
        return [self._make(request_id, prompt, ids, params, sampling, priority, caller) for sampling in samplings]

    def _make(
        self,
        request_id: str,
        prompt: PreparedPrompt,
        token_ids: array,
        params: SamplingParams,
        sampling: RowSampling,
        priority: int,
        caller: str,
    ) -> Request:
        room = self._max_model_len - len(token_ids)
        max_tokens = max(params.max_tokens or self._max_new_tokens or room, params.min_tokens)
        arrival = next(self._arrivals)
        return Request(
            request_id=f"{request_id}/{arrival}",
            prompt_token_ids=token_ids,
            sampling=sampling,
            max_tokens=min(max_tokens, room),
            arrival=arrival,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            eos_token_ids=frozenset() if params.ignore_eos else self._eos,
            priority=priority,
            cache_salt=prompt.cache_salt,
            checkpoint_positions=prompt.checkpoint_positions,
            caller=caller,
            media=prompt.media,
            logits_processors=tuple(params.logits_processors or ()),
        )


def derive_seed(engine_seed: int, number: int) -> int:
    """Derive the seed of a request without one: 64 bits from the engine's seed and the request's number."""
    digest = hashlib.blake2b(f"{engine_seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _sample_seed(seed: int, index: int) -> int:
    """The seed of completion ``index``. Completion 0 has the request's own, so ``n`` does not change its text."""
    seed %= 2**64
    return seed if index == 0 else derive_seed(seed, index)
