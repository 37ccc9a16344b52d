"""Conversion of text to token ids and back.

Job: a thin layer over transformers' tokenizers. Does not know: requests, models, tensors, or texts that grow
(``detokenizer.py``). transformers is imported when a tokenizer is loaded, not before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

from weft.config.json_object import JsonObject
from weft.errors import ConfigError, RequestError
from weft.text.chat_template import ChatTemplate
from weft.text.encoder import TextEncoder

_MANY = 4096

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def _byte_level_alphabet() -> dict[str, int]:
    """Map characters to bytes as byte-level vocabularies do: printable bytes are themselves, the others start at
    U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_level_alphabet()


class Tokenizer:
    """The tokenizer of a checkpoint. Use ``Tokenizer.load``.

    Attributes:
        vocab_size: number of ids with a token, added tokens included. A model's embedding may be larger.
        special_token_ids: ids that ``skip_special_tokens`` leaves out.
        bos_token_id, eos_token_id: None where the checkpoint names none.
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        """Wrap ``hf_tokenizer``, a fast tokenizer of transformers."""
        self.hf = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        # Encoding calls the backend directly, which takes half the time of transformers' call. transformers resets
        # truncation and padding before each call, because the file may enable them; so they are reset here.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = hf_tokenizer.split_special_tokens
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self._token_texts: dict[int, str] = {}
        self._known_ids: dict[int, bool] = {}
        self._is_byte_level = type(self._backend.decoder).__name__ == "ByteLevel"
        self._bytes_by_id = {skip: BytesById(self, skip) for skip in (False, True)}
        self.vocab_size: int = len(hf_tokenizer)
        self.bos_token_id: int | None = hf_tokenizer.bos_token_id
        self.eos_token_id: int | None = hf_tokenizer.eos_token_id
        self._adds_bos = self._backend.encode("").ids[:1] == [self.bos_token_id]
        self._encoder = TextEncoder(self._backend)
        self.template = ChatTemplate(hf_tokenizer)

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
        except Exception as error:  # the libraries raise anything from KeyError to Rust exceptions of their own
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

    def with_template(self, template: str) -> Tokenizer:
        """Return the same tokenizer with another chat template."""
        other, hf = copy(self), copy(self.hf)
        hf.chat_template = template
        other.template = ChatTemplate(hf)
        return other

    def encode(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Encode a text, with the tokenizer's own prefix (such as a BOS) unless ``add_special_tokens`` is False.

        A text that begins with the BOS already, as chat templates write it, gets no second one. ``limit``: the caller
        rejects more tokens than that, so a long text may be encoded only until it exceeds the limit.

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
        if len(token_ids) > _MANY:  # a batch call lets other threads run
            return self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one id alone, special tokens included. Cached, since log probabilities ask for many ids."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id, which may be part of a character."""
        text = self.token_text(token_id)
        token = self._backend.id_to_token(token_id) if REPLACEMENT in text else None
        if token is None:
            return text.encode("utf-8", "replace")
        if re.fullmatch("<0x[0-9A-F]{2}>", token):  # byte fallback
            return bytes([int(token[3:5], 16)])
        if all(character in _BYTES for character in token):  # byte-level
            return bytes(_BYTES[character] for character in token)
        return text.encode("utf-8", "replace")

    def bytes_by_id(self, *, skip_special_tokens: bool) -> BytesById | None:
        """The bytes of every id in a byte-level vocabulary; None for vocabularies in which the bytes of a text are not
        those of its ids in order."""
        return self._bytes_by_id[skip_special_tokens] if self._is_byte_level else None

    def has_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether decoding keeps the id. It drops ids without a token, and special tokens."""
        if skip_special_tokens and token_id in self.special_token_ids:
            return False
        known = self._known_ids.get(token_id)
        if known is None:
            known = self._known_ids[token_id] = self._backend.id_to_token(token_id) is not None
        return known


class BytesById(dict[int, bytes]):
    """The bytes of each id, computed when first needed. Ids that ``Tokenizer.decode`` drops have no bytes."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens

    def __missing__(self, token_id: int) -> bytes:
        known = self._tokenizer.has_text(token_id, skip_special_tokens=self._skip)
        value = self[token_id] = self._tokenizer.token_bytes(token_id) if known else b""
        return value


def _class_of(folder: Path) -> Any:
    """The class that reads the tokenizer. transformers could find it, but would import torch, which a server process
    does not need. Files that name the general class are read by that class directly."""
    config = folder / "tokenizer_config.json"
    if config.is_file() and json.loads(config.read_bytes()).get("tokenizer_class") == "PreTrainedTokenizerFast":
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _processor_template(folder: Path) -> str | None:
    """The template in ``chat_template.json``, where older multimodal checkpoints store it."""
    path = folder / "chat_template.json"
    if not path.is_file():
        return None
    return JsonObject.load(path).text("chat_template")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "no message")
