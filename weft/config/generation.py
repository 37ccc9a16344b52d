"""Request defaults from a checkpoint's ``generation_config.json``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.config.json_object import JsonObject


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The request defaults of a checkpoint. A field is None if the file does not set it.

    ``do_sample: false`` in the file becomes ``temperature=0.0``. ``eos_token_ids`` is empty if the file has none.
    ``max_new_tokens`` is the default of ``max_tokens``. ``suppress_tokens`` are never sampled. ``not_used`` lists all
    other keys of the file as ``key=value``.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    max_new_tokens: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    not_used: tuple[str, ...] = ()


_USED = frozenset({"do_sample", "eos_token_id", *GenerationDefaults.__dataclass_fields__})
_SAYS_NOTHING = frozenset({"bos_token_id", "decoder_start_token_id", "pad_token_id", "transformers_version"})


def read_generation_config(folder: Path) -> GenerationDefaults:
    """Read ``folder/generation_config.json``; all defaults if there is no such file.

    Raises:
        ConfigError: the file is there but broken, or a value has the wrong type or range.
    """
    path = Path(folder) / "generation_config.json"
    if not path.exists():
        return GenerationDefaults()
    config = JsonObject.load(path)
    temperature = config.number("temperature", open_low=False) if config.given("temperature") else None
    if not config.boolean("do_sample", True):
        temperature = 0.0
    top_p = config.number("top_p") if config.given("top_p") else None
    min_p = config.number("min_p", open_low=False) if config.given("min_p") else None
    for key, value in (("top_p", top_p), ("min_p", min_p)):
        if value is not None and value > 1.0:
            raise config.wrong(key, "a share of at most 1")
    return GenerationDefaults(
        temperature=temperature,
        top_k=config.integer("top_k", low=-1) if config.given("top_k") else None,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=config.number("repetition_penalty") if config.given("repetition_penalty") else None,
        eos_token_ids=config.integers("eos_token_id"),
        max_new_tokens=config.integer("max_new_tokens") if config.given("max_new_tokens") else None,
        suppress_tokens=config.integers("suppress_tokens"),
        not_used=tuple(f"{key}={value!r}" for key, value in config.values.items() if _is_dropped(key, value)),
    )


def _is_dropped(key: str, value: Any) -> bool:
    """Whether the key asks for something that Weft does not read. Values of nothing, 0 and 1 switch such keys off."""
    return key not in _USED | _SAYS_NOTHING and not key.startswith("_") and value not in (None, 0, 1, "", [])
