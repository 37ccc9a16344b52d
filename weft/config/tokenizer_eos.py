"""The tokenizer's EOS, read from its files. Settings are resolved before a tokenizer is loaded."""

from pathlib import Path

import msgspec


class _Token(msgspec.Struct):
    content: str
    id: int = -1


class _TokenizerConfig(msgspec.Struct):
    eos_token: str | _Token | None = None


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_Token] = []


def read_eos_token_id(folder: Path) -> int | None:
    """Id of ``eos_token`` in ``folder/tokenizer_config.json``, looked up in the added tokens of ``tokenizer.json``.

    Returns None if there is no such token. Missing or broken files are ignored: loading the tokenizer reports them.
    """
    try:
        config = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes(), type=_TokenizerConfig)
        tokens = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_TokenizerFile).added_tokens
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
    eos = config.eos_token.content if isinstance(config.eos_token, _Token) else config.eos_token
    return next((token.id for token in tokens if token.content == eos), None)
