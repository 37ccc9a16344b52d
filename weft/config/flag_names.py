"""Names of settings as flags of the command line, alone and within messages."""

import re
from collections.abc import Iterable

from weft.config.fields import OPTIONS


def flag_name(setting: str) -> str:
    """Return the flag of a setting: ``--max-model-len`` of ``max_model_len``."""
    return "--" + setting.replace("_", "-")


def with_flags(message: str, further: Iterable[str] = ()) -> str:
    """Write the settings that a message names as flags, for a reader who gave flags.

    ``page_size=5`` becomes ``--page-size 5``, and a setting that is off becomes ``--no-…``. A name of one word, such as
    ``device``, is a setting only if a value follows. ``further``: names besides the engine's settings.
    """
    names = "|".join(sorted({*OPTIONS, *further}, key=len, reverse=True))
    return re.sub(rf"(?<![\w./\"-])'?\b({names})\b'?(?![\w(/-])(=(?:True\b|False\b|'[\w.-]*')?)?", _as_flag, message)


def _as_flag(found: re.Match[str]) -> str:
    name, value = found[1], found[2]
    if value is None:
        return flag_name(name) if "_" in name else found[0]
    if value in ("=True", "=False"):
        return ("--" if value == "=True" else "--no-") + flag_name(name)[2:]
    return f"{flag_name(name)} {value[1:].strip(chr(39))}"
