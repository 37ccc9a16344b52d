"""Text to token ids and back: encoding, chat templates, incremental detokenisation, stop strings.

Job: a thin layer over transformers' tokenizers, and the two streaming state machines that a growing text needs.
Owns: what text of an unfinished answer may be shown. Does not know: requests, models, tensors. transformers is imported
when a tokenizer is loaded, not before.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.config.json_object import JsonObject
from weft.errors import ConfigError, RequestError
from weft.text_pieces import TextEncoder

_MANY = 4096

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TEMPLATE_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write bytes as characters: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_level_alphabet()


class Tokenizer:
    """A checkpoint's tokenizer. Use ``Tokenizer.load``.

    Attributes:
        vocab_size: ids with a token, added ones included (a model's embedding may be larger).
        special_token_ids: ids that ``skip_special_tokens`` leaves out.
        bos_token_id, eos_token_id: None where the checkpoint names none.
        hf: the tokenizer of transformers.
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        """``hf_tokenizer``: a fast tokenizer of transformers."""
        self.hf = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        # Encoding goes to the backend at once, without the half of the time that transformers takes around it. So what
        # transformers sets before each call is set here: the file may ask for truncation or padding, which it ignores.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = hf_tokenizer.split_special_tokens
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self._token_texts: dict[int, str] = {}
        self._known_ids: dict[int, bool] = {}
        self.vocab_size: int = len(hf_tokenizer)
        self.bos_token_id: int | None = hf_tokenizer.bos_token_id
        self.eos_token_id: int | None = hf_tokenizer.eos_token_id
        self._adds_bos = self._backend.encode("").ids[:1] == [self.bos_token_id]
        self._encoder = TextEncoder(self._backend)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer files of a folder. Code in the folder is never run, and nothing is downloaded.

        Raises:
            ConfigError: no tokenizer there, or one that cannot be read.
        """
        folder = Path(path)
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise ConfigError(
                f"no tokenizer in {folder} (looked for {', '.join(_TOKENIZER_FILES)}); add the checkpoint's tokenizer "
                "files, name another tokenizer, or set skip_tokenizer_init=True and work with token ids"
            )
        try:
            hf_tokenizer = _class_of(folder).from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # the libraries raise anything from KeyError to their own Rust exceptions
            raise ConfigError(
                f"the tokenizer in {folder} cannot be read ({type(error).__name__}: {_first_line(error)}); "
                "fetch its files again or name another tokenizer"
            ) from error
        if not hf_tokenizer.is_fast:
            raise ConfigError(
                f"the tokenizer in {folder} has no tokenizer.json; add the one of the published checkpoint"
            )
        if hf_tokenizer.chat_template is None:
            hf_tokenizer.chat_template = _processor_template(folder)
        return cls(hf_tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Token ids of a text, with the tokenizer's own prefix (such as a BOS) unless ``add_special_tokens`` is False.

        A text that already begins with the BOS, as chat templates write it, gets no second one. ``limit``: more tokens
        than that are of no use; a long text may then give only its first ones, but more than the limit.

        Raises:
            RequestError: the text holds lone surrogates, which have no encoding.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode at character {error.start}; remove the lone surrogate"
            ) from error
        ids = self._encoder.encode(text, add_special_tokens=add_special_tokens, limit=limit)
        has_two = add_special_tokens and self._adds_bos and ids[:2] == [self.bos_token_id] * 2
        return ids[1:] if has_two else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids without a token give none."""
        if len(token_ids) > _MANY:  # a batch call lets other threads run
            return self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one id alone, special tokens included; remembered, since log probabilities ask for many."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id stands for, which need not be whole characters."""
        text = self.token_text(token_id)
        token = self._backend.id_to_token(token_id) if REPLACEMENT in text else None
        if token is None:
            return text.encode("utf-8", "replace")
        if re.fullmatch("<0x[0-9A-F]{2}>", token):  # byte fallback
            return bytes([int(token[3:5], 16)])
        if all(character in _BYTES for character in token):  # byte-level
            return bytes(_BYTES[character] for character in token)
        return text.encode("utf-8", "replace")

    def has_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """False if decoding leaves this id out: it has no token, or is a special one to be skipped."""
        if skip_special_tokens and token_id in self.special_token_ids:
            return False
        known = self._known_ids.get(token_id)
        if known is None:
            known = self._known_ids[token_id] = self._backend.id_to_token(token_id) is not None
        return known

    @property
    def chat_template(self) -> str | None:
        """The one template of the checkpoint as text; None if it has none or several by name."""
        template = self.hf.chat_template
        return template if isinstance(template, str) else None

    @property
    def has_chat_template(self) -> bool:
        return self.hf.chat_template is not None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """A conversation as the checkpoint's chat template writes it; encode it with ``add_special_tokens=False``.

        Args:
            messages: dicts with ``role``, ``content`` and whatever else the template reads.
            tools: JSON-schema function descriptions.
            chat_template_kwargs: further variables of the template, such as ``enable_thinking``.
            add_generation_prompt: end with the header of an assistant turn.
            continue_final_message: leave the last message open, to be continued.

        Raises:
            RequestError: no template, no messages, or something that the template refuses.
        """
        variables = dict(chat_template_kwargs or {})
        self._check_chat(messages, variables, add_generation_prompt, continue_final_message)
        try:
            return self.hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except Exception as error:  # templates are programs of the checkpoint: anything can come out of them
            raise RequestError(f"the chat template refuses these messages: {_first_line(error)}", "messages") from error

    def _check_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: dict[str, Any], add_prompt: bool, continue_final: bool
    ) -> None:
        if not self.has_chat_template:
            raise RequestError(
                "this checkpoint has no chat template; render the conversation yourself and use generate()", "messages"
            )
        if not messages:
            raise RequestError("messages is empty; a chat needs at least one message", "messages")
        if any(not isinstance(message, Mapping) or "role" not in message for message in messages):
            raise RequestError("every message must be a dict with at least a 'role'", "messages")
        if add_prompt and continue_final:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to False",
                "continue_final_message",
            )
        reserved = sorted(_TEMPLATE_ARGUMENTS.intersection(variables))
        if reserved:
            raise RequestError(
                f"chat_template_kwargs holds {', '.join(reserved)}, not variables of a template; leave them out",
                "chat_template_kwargs",
            )


def _class_of(folder: Path) -> Any:
    """The class that reads the tokenizer. Finding it out is transformers' job, but that takes torch with it, which a
    server process has no other use for; files that name the general class are read by it at once."""
    config = folder / "tokenizer_config.json"
    if config.is_file() and json.loads(config.read_bytes()).get("tokenizer_class") == "PreTrainedTokenizerFast":
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _processor_template(folder: Path) -> str | None:
    """The template in ``chat_template.json``, where older multimodal checkpoints keep it."""
    path = folder / "chat_template.json"
    if not path.is_file():
        return None
    return JsonObject.load(path).text("chat_template")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "no message")


class IncrementalDetokenizer:
    """The text of a growing list of token ids, piece by piece.

    The pieces, ``finish()`` included, add up to ``Tokenizer.decode`` of prompt and generated ids, less its text.
    A character whose bytes are spread over several tokens is held back until it is whole; one that the prompt began
    belongs to the generated text. Each call decodes a short window of recent tokens, so its cost does not grow with the
    text; the window starts at a character boundary and keeps some tokens that are already out, since decoders treat the
    first token of a text differently (leading spaces).

    Two kinds of garbage are exempt from the sum: a byte-fallback tokenizer can take back characters already shown
    when a broken byte follows, and more than ``MAX_HELD`` tokens in a row without a whole character are let go.
    """

    MAX_HELD = 64
    _CONTEXT = 4
    _MAX_PENDING = 3  # an unfinished UTF-8 character has at most three bytes, so at most three U+FFFD stand for it

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """``prompt_token_ids``: what the text continues; only the last few are looked at."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window, pending, self._whole = self._context(prompt_token_ids)  # the text that will not change any more
        self._old = len(self._window)  # ids of the window that belong to the context
        self._window += pending
        self._shown = self._decode(self._window) if pending else self._whole  # the part of the text that is out
        self._is_all_out = True

    def extend(self, token_ids: Sequence[int]) -> str:
        """Take in some ids; the text that can be shown now, often empty or several characters.

        Ids that come together are decoded together where that makes no difference: where they end with a character.
        """
        new = [token_id for token_id in token_ids if self._has_text(token_id)]
        return "".join(self._extend(new[i : i + self.MAX_HELD]) for i in range(0, len(new), self.MAX_HELD))

    def _extend(self, new: list[int]) -> str:
        if len(new) > 1:
            text = self._decode(self._window + new)
            if text.startswith(self._shown) and REPLACEMENT not in text[len(self._shown) :]:
                self._window += new
                return self._show(text, len(text))
        return "".join(map(self._append, new))

    def _append(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = len(text)
        if len(self._window) - self._old <= self.MAX_HELD:
            if not text.startswith(self._shown):
                if not text.startswith(self._whole):
                    self._is_all_out = False
                    return ""  # byte fallback reads a whole run of bytes as broken until its last character is whole
                self._shown = self._whole
            run = len(text) - len(text.rstrip(REPLACEMENT))
            stable = max(stable - min(run, self._MAX_PENDING), len(self._shown))
        return self._show(text, stable)

    def _show(self, text: str, stable: int) -> str:
        """The window's text is ``text``, and so many of its characters can be out."""
        delta = text[len(self._shown) : stable]
        self._shown = text[:stable]
        if delta:
            self._whole = self._shown
        self._is_all_out = stable == len(text)
        if self._is_all_out:
            self._advance()
        return delta

    def finish(self) -> str:
        """The text still held back: U+FFFD for a character that never became whole."""
        if self._is_all_out:
            return ""
        text = self._decode(self._window)
        delta = text[len(self._shown) :]
        self._shown = text
        return delta

    def _context(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], list[int], str]:
        """The prompt's last few ids from a character boundary on, those after them that begin another character, and
        the text of the former."""
        recent = (i for i in reversed(prompt_token_ids[-self.MAX_HELD :]) if self._has_text(i))
        tail = list(itertools.islice(recent, self._CONTEXT + 2 * self._MAX_PENDING))[::-1]
        for end in range(len(tail), max(len(tail) - self._MAX_PENDING, 0) - 1, -1):
            for start in range(max(end - self._CONTEXT, 0) + 1):
                text = self._decode(tail[start:end])
                if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                    return tail[start:end], tail[end:], text
        return tail, [], self._decode(tail)

    def _advance(self) -> None:
        """Everything is out: let the newer tokens become the context once there are enough of them."""
        if len(self._window) - self._old >= self._CONTEXT:
            self._window = self._window[self._old :]
            self._old = len(self._window)
            self._shown = self._whole = self._decode(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def _has_text(self, token_id: int) -> bool:
        return self._tokenizer.has_text(token_id, skip_special_tokens=self._skip)


class StopStrings:
    """Finds the first stop string in a growing text, however the text is cut, and holds back what may become one.

    The first is the one that is complete first; of two that end together, the longer. The pieces returned, ``finish()``
    included, add up to the text up to the stop string (and through it if ``include``).

    Attributes:
        matched: the stop string found, or None. Text after it is dropped.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = list(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def append(self, delta: str, *, may_stop: bool = True) -> str:
        """Take in more text; the text that can be shown now.

        ``may_stop=False``: a stop string that ends within ``delta`` does not count (before ``min_tokens``).
        """
        if self.matched is not None:
            return ""
        text = self._held + delta
        if may_stop:
            found = self._first_match(text)
            if found is not None:
                end, self.matched = found
                self._held = ""
                return text[:end] if self._include else text[: end - len(self.matched)]
        hold = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def finish(self) -> str:
        """The text held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """End and stop string of the match that is complete first, among those that end in the new text."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), -len(stop), stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[0], best[2])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``, but not all of it."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
