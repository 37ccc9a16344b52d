"""Errors that Weft raises for its users.

Messages say what was given, what is allowed and what to do. Anything a user can cause raises a ``WeftError``.
Invariants of Weft itself are checked with ``assert``.
"""

_LONGEST_MESSAGE = 1000
"""Upper bound on characters in a message about a request, since messages go into logs and answers."""


class WeftError(Exception):
    """Base class of every error that a user of Weft can cause."""


class ConfigError(WeftError, ValueError):
    """A setting, a combination of settings, or their checkpoint cannot be used. A retry will fail as well."""


class UnsupportedModelError(ConfigError):
    """The checkpoint's config asks for something Weft does not implement."""


class WeightsError(ConfigError):
    """A checkpoint's tensors do not match the model: missing, left over, of the wrong shape, or unreadable."""


class RequestError(WeftError, ValueError):
    """One request is not valid. Other requests are not affected.

    Args:
        message: what was given, what is allowed, what to do. A long message, which repeats what was given, is cut in
            the middle.
        param: the name of the offending request field, if one field is to blame (the OpenAI error's ``param``).
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        if len(message) > _LONGEST_MESSAGE:
            message = f"{message[: _LONGEST_MESSAGE // 2]} … {message[-_LONGEST_MESSAGE // 2 :]}"
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """A prompt is too long for the model's context, or for the cache."""


class NotSupportedError(WeftError, AttributeError):
    """A method of vLLM's ``LLM`` that Weft lacks. The message names the alternative."""


class CapacityError(WeftError, RuntimeError):
    """Memory for weights or caches does not suffice for the requested setting."""


class UnavailableError(WeftError, RuntimeError):
    """The engine serves no requests now, because it is asleep or has no valid weights. The message says what to do."""


class EngineDeadError(WeftError, RuntimeError):
    """The engine loop has died. The engine can serve no more requests."""


class EngineFrozenError(WeftError, RuntimeError):
    """The engine process gives no sign of life. It may recover later."""
