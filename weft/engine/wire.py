"""The messages between server process and engine process.

Job: the messages as msgspec structs, and their bytes (msgpack with a type tag, never pickle). Owns: their fields. Does
not know: sockets (``channel.py``), or who reads them.

Messages to the engine, in lists: ``RequestSpec``, ``FinishRequests``, ``Inspect``, ``ResetPrefixCache``, ``Control``,
``Shutdown``; to several replicas also ``DrainReplica`` and ``StartReplica``.

Messages from the engine, in this order: ``Configured``, ``Stage`` (several), ``Ready``, then ``Outputs`` for each step
that changed something. An ``Inspected`` answers each ``Inspect``, a ``PrefixCacheReset`` each ``ResetPrefixCache``, a
``Controlled`` each ``Control``. A replica also sends ``CachedPrefixes``. ``Failed`` says that the engine cannot start
or go on. Moments are seconds of ``time.monotonic()``, which all processes of a machine share on Linux.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from weft.config import EngineConfig
from weft.config.transport import decode_other, encode_other
from weft.engine.snapshot import Snapshot
from weft.errors import ConfigError, WeftError
from weft.messages import TokenLogprobs
from weft.multimodal.items import MediaItem
from weft.outputs import CacheReport
from weft.request import FinishReason, Request, RequestSpec
from weft.stats import EngineStats


class FinishRequests(msgspec.Struct, frozen=True, tag="finish"):
    """End these requests now, without a further message about them. ``reason``: ``"abort"``, or ``"stop"`` (stop
    string)."""

    request_ids: list[str]
    reason: FinishReason = "abort"


class Inspect(msgspec.Struct, frozen=True, tag="inspect"):
    """Send ``Inspected`` now.

    Attributes:
        tokens_per_node: upper bound on token ids per tree node in the answer.
        replica: the replica to inspect; None: the first that is up. A replica that is not up does not answer.
    """

    number: int
    tokens_per_node: int = 0
    replica: int | None = None


class DrainReplica(msgspec.Struct, frozen=True, tag="drain_replica"):
    """Drain a replica: send no more requests, let the open ones finish, and end the process. Not for a single
    engine."""

    replica: int


class StartReplica(msgspec.Struct, frozen=True, tag="start_replica"):
    """Start a replica that was drained, or is down. Not for a single engine."""

    replica: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset"):
    """Drop every cached prefix, and answer with ``PrefixCacheReset`` whether that was possible."""


class Control(msgspec.Struct, frozen=True, tag="control"):
    """A command of an administrator; see ``engine/controls.py``. All replicas carry it out.

    Attributes:
        action: pause, resume, sleep, wake_up, state, load, open, receive, join or leave; lose, to an engine that is
            started again after an update.
        mode: what open requests do.
    """

    number: int
    action: str
    mode: str = "wait"
    arguments: dict[str, Any] = {}


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Exit with status 0."""


ToEngine = RequestSpec | FinishRequests | Inspect | ResetPrefixCache | DrainReplica | StartReplica | Control | Shutdown


class Configured(msgspec.Struct, frozen=True, tag="configured"):
    """The settings are resolved. Weights and caches follow."""

    config: EngineConfig


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """A stage of the start has ended, after ``seconds``. ``note`` says what it did."""

    name: str
    seconds: float
    note: str = ""


class Capacity(msgspec.Struct, frozen=True):
    """The capacity of the engine, after clamping to memory. Only pages and state slots that requests can get are
    counted, not those for padding; a set of replicas reports sums."""

    max_model_len: int
    max_num_seqs: int
    num_pages: int
    page_size: int
    num_slots: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine accepts requests."""

    capacity: Capacity


FAILED_STATUS = 70
"""Exit status of an engine that has sent ``Failed``."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine is about to exit. With ``user_error`` the settings or the checkpoint are to blame, and ``message``
    names the remedy."""

    message: str
    user_error: bool = False


class Update(msgspec.Struct, frozen=True, array_like=True):
    """Changes of one request since its last update. Moments and counters as in ``Request``.

    A request is "unavailable" that ended because no request can run; ``stop_reason`` says why.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | Literal["unavailable"] | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_preemptions: int = 0
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    cache_report: CacheReport | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    no_drafts_because: str = ""
    weight_version: int = 0

    def apply(self, request: Request) -> None:
        """Bring the server's copy of the request up to date. The caller handles "unavailable"."""
        assert self.finish_reason != "unavailable"
        request.note_version(self.weight_version)
        request.output_token_ids += self.token_ids
        if self.logprobs:
            request.logprobs += self.logprobs
        if self.prompt_logprobs:
            request.prompt_logprobs += self.prompt_logprobs
        request.finish_reason, request.stop_reason = self.finish_reason, self.stop_reason
        request.num_cached_tokens, request.num_preemptions = self.num_cached_tokens, self.num_preemptions
        request.num_draft_tokens, request.num_accepted_tokens = self.num_draft_tokens, self.num_accepted_tokens
        request.no_drafts_because = self.no_drafts_because
        if self.cache_report is not None:
            request.cache_report = self.cache_report
        times = request.times
        times.first_scheduled, times.first_token, times.finished = self.first_scheduled, self.first_token, self.finished


def moved(update: Update, seconds: float) -> Update:
    """The update with its moments moved by ``seconds``, to another machine's clock."""
    moments = {name: getattr(update, name) for name in ("first_scheduled", "first_token", "finished")}
    return replace(update, **{name: at + seconds for name, at in moments.items() if at is not None})


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """The changes of one step."""

    updates: list[Update]
    stats: EngineStats


class PrefixCacheReset(msgspec.Struct, frozen=True, tag="was_reset"):
    """The answer to a reset. ``done`` is False if requests run, so that nothing was dropped."""

    done: bool


class Inspected(msgspec.Struct, frozen=True, tag="inspected"):
    """A snapshot of the engine, for the ``Inspect`` of this number. ``replica``: the inspected one of several."""

    number: int
    snapshot: Snapshot
    replica: int | None = None


class Controlled(msgspec.Struct, frozen=True, tag="controlled"):
    """The answer to the ``Control`` of this number, and the engine's state.

    Attributes:
        unavailable: the reason why no request can run; empty if requests can run.
        error: the reason why the command failed; empty if it succeeded.
        replicas_out: of several replicas, those that get no requests now, each with the reason.
    """

    number: int
    is_sleeping: bool
    is_paused: bool
    weight_version: int
    unavailable: str = ""
    error: str = ""
    replicas_out: dict[int, str] = {}


class CachedPrefixes(msgspec.Struct, frozen=True, tag="prefixes"):
    """The prefixes that a replica has cached; see ``weft/engine/prefix_hashes.py``.

    Attributes:
        hashes: of prefixes on the device.
        below: of prefixes that the tier below would restore.
        price: cost of restoring a token, as a share of the cost of computing it.
    """

    hashes: list[int]
    below: list[int] = []
    price: float = 1.0


FromEngine = Configured | Stage | Ready | Failed | Outputs | Inspected | CachedPrefixes | PrefixCacheReset | Controlled


encode = msgspec.msgpack.Encoder(enc_hook=encode_other).encode
_decode_to_engine = msgspec.msgpack.Decoder(list[ToEngine], dec_hook=decode_other).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=decode_other).decode


def encode_to_engine(messages: Sequence[ToEngine]) -> bytes:
    """Encode messages that are sent together. Pixels shared by several requests, as by the completions of one prompt,
    are sent once."""
    sent: set[bytes] = set()

    def once(item: MediaItem) -> MediaItem:
        if item.content_hash in sent:
            return item.without_pixels()
        sent.add(item.content_hash)
        return item

    return encode([_with_media(message, once) for message in messages])


def decode_to_engine(content: bytes | memoryview) -> list[ToEngine]:
    """Decode the messages of ``encode_to_engine``."""
    pixels: dict[bytes, bytes] = {}

    def whole(item: MediaItem) -> MediaItem:
        return replace(item, pixel_values=pixels.setdefault(item.content_hash, item.pixel_values))

    return [_with_media(message, whole) for message in _decode_to_engine(content)]


def _with_media(message: ToEngine, change: Callable[[MediaItem], MediaItem]) -> ToEngine:
    if not isinstance(message, RequestSpec) or not message.media:
        return message
    return replace(message, media=[change(item) for item in message.media])


def failure(error: BaseException) -> Failed:
    """Make the message about the engine's end."""
    if isinstance(error, WeftError):
        return Failed(str(error), user_error=isinstance(error, ConfigError))
    return Failed(f"{type(error).__name__}: {error}")
