"""Large request bodies: parsed, checked, rendered and tokenized in worker processes.

Job: decide which bodies are large, and have ``prompt_worker.py`` read them. A worker returns the request without its
prompt, and token ids as bytes. Owns: the messages to the workers. Does not know: what a request means.
"""

from array import array
from typing import TypeVar

import msgspec

from weft.config import EngineConfig
from weft.engine.chat_prompts import ChatPrompt
from weft.server.protocol import BodyReader
from weft.server.settings import ServerSettings
from weft.server.worker import decode, encode
from weft.server.worker_pool import WorkerKind, WorkerPool

LARGE_BODY = 256 << 10
"""Bytes up to which the event loop reads a body: that takes a few milliseconds."""

_FEW_MARKS = 20_000
"""Quotes and commas up to which the event loop reads a large body with images: it has few values."""

LIMIT_S = 60.0
"""Processor time for one body. Tokenizing 8 MiB takes about 4 s."""

MEMORY_BYTES = 2 << 30

SMALL_BYTES = 1 << 20

Body = TypeVar("Body", bound=msgspec.Struct)


class PromptSetup(msgspec.Struct, frozen=True):
    """The setup of a worker. ``text_only``, ``keeps_states``: see ``InputProcessor`` and ``Service``."""

    config: EngineConfig
    settings: ServerSettings
    max_model_len: int
    text_only: str | None
    keeps_states: bool


class ReadBody(msgspec.Struct, frozen=True):
    """Read the body beside this message, of a request to ``path``."""

    path: str


class ReadPrompt(msgspec.Struct, frozen=True):
    """A prompt without its token ids, which stand beside the message in order."""

    text: str | None
    num_tokens: int
    positions: list[int]


class BodyRead(msgspec.Struct, frozen=True):
    """The result of ``ReadBody``.

    Attributes:
        request: the request without its prompt, encoded; empty: the bytes beside this message are the response.
        model: the model that the request names.
        prompts: the prompts; None: there are images, so the body has to be read in the event loop's process.
    """

    request: bytes
    model: str | None
    unknown: list[str]
    prompts: list[ReadPrompt] | None = None


def is_large(body: bytes) -> bool:
    """True if the event loop should not read this body. Images are large, but have few values."""
    if len(body) <= LARGE_BODY:
        return False
    return b";base64," not in body or body.count(b'"') + body.count(b",") > _FEW_MARKS


class LargeBodies:
    """The workers for large bodies of one engine's requests. They start with the first large body."""

    def __init__(self, setup: PromptSetup) -> None:
        kind = WorkerKind(
            "large bodies", "weft.server.prompt_worker", encode(setup), MEMORY_BYTES, LIMIT_S, SMALL_BYTES
        )
        self._workers = WorkerPool(kind)

    async def read(
        self, path: str, body: bytes, kind: type[Body], bodies: BodyReader, caller: str
    ) -> tuple[Body, list[ChatPrompt]] | None:
        """Read the request to ``path``. Returns the request without prompts, and the prompts; None for images.

        Raises:
            RequestError: it is not valid.
        """
        found, ids = await self._run(path, body, caller)
        if found.prompts is None:
            return None
        bodies.warn(found.unknown)
        prompts, start = [], 0
        for prompt in found.prompts:
            end = start + 4 * prompt.num_tokens
            prompts.append(ChatPrompt(prompt.text or "", array("I", ids[start:end]).tolist(), prompt.positions))
            start = end
        return decode(found.request, kind), prompts

    async def respond(self, path: str, body: bytes, bodies: BodyReader, caller: str) -> tuple[str | None, bytes]:
        """Answer a request to ``path`` in a worker. Returns the model that it names, and the body of the response."""
        found, content = await self._run(path, body, caller)
        bodies.warn(found.unknown)
        return found.model, content

    async def _run(self, path: str, body: bytes, caller: str) -> tuple[BodyRead, bytes]:
        param = "prompt" if path in ("/v1/completions", "/tokenize") else "messages"
        content, blob = await self._workers.run(ReadBody(path), body, caller=caller, size=len(body), param=param)
        return decode(content, BodyRead), blob

    def close(self) -> None:
        self._workers.close()
