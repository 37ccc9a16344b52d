"""The served model: its engine client, and whether it accepts requests.

Job: take up the engine when it is ready, report its stages, drain. Owns: the tokenizer, the image processor and the
state of the service.
Does not know: routes, the shape of requests, who keeps the engine's process (an ``EngineClient``).

    starting ──▶ ready ──▶ draining ──▶ (exit 0)
       ▲  │        │
       │  └──▶ dead ◀┘   (exit 1; with restart_engine: back to starting)
"""

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from weft.config import EngineConfig
from weft.engine import wire
from weft.engine.async_engine import AsyncEngine, TokenTimes
from weft.engine.input_processor import InputProcessor
from weft.engine.launcher import GRACE_S
from weft.engine.supervisor import EngineClient
from weft.errors import EngineFrozenError
from weft.multimodal.processor import MediaProcessor, load_processor
from weft.server.admission import Admission, OpenCounts
from weft.server.errors import ApiError
from weft.server.grammar_check import GrammarChecker
from weft.server.history import History
from weft.server.large_bodies import LargeBodies, PromptSetup
from weft.server.media_pool import MediaPool
from weft.server.process_reports import ApiProcesses, SingleProcess
from weft.server.rendering import RenderPool
from weft.server.settings import ServerSettings
from weft.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

FROZEN_AFTER_S = 3.0
"""The engine's heartbeat comes four times a second; without one for so long the engine stands still."""

_WATCH_S = 0.25
"""Seconds between two looks at the heartbeat, for calls that came while it was not late yet."""

DRAINED_RETRY_S = 5
"""When a caller of a server that is leaving may expect another in its place."""

ReportStage = Callable[[str, float, str], None]
"""Reports a stage of the start: name, seconds, note."""


class State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Service:
    """One model, one engine process at a time.

    Args:
        engine: the engine, in the hands of whoever keeps it.
        report_stage: called with stages of the start.
        api_processes: all of the engine.
        counts: the open completions of all of them.
        numbers: of its requests and looks into the engine; see ``InputProcessor``.

    Attributes:
        state: see the module.
        keeps_states: the engine caches recurrent states; see ``EngineConfig.keeps_states``.
        became_ready: set when it was READY for the first time.
        ended: set when the service is over; ``failure`` then says why, or is None.
        history: what it did in the last hour, restarts of the engine included.
        token_times: called with the moments of tokens.
    """

    def __init__(
        self,
        settings: ServerSettings,
        engine: EngineClient,
        report_stage: ReportStage = lambda name, seconds, note: None,
        *,
        api_processes: ApiProcesses | None = None,
        counts: OpenCounts | None = None,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self.settings = settings
        self.state = State.STARTING
        self.became_ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.failure: wire.Failed | None = None
        self.created = int(time.time())
        self.render = RenderPool(settings.template_timeout_s)
        self.media = MediaPool()
        self.history = History()
        self.token_times: list[TokenTimes] = [self.history]
        self.engine_client = engine
        self.api_processes = api_processes or SingleProcess()
        engine.listen(self._handle, self._lost)
        self._grammars: GrammarChecker | None = None
        self._report_stage = report_stage
        self._counts = counts or OpenCounts()
        self._numbers = numbers
        self._engine: AsyncEngine | None = None
        self._controlled: wire.Controlled | None = None
        self._config: EngineConfig | None = None
        self.keeps_states = False
        self._capacity: wire.Capacity | None = None
        self._readers: asyncio.Task[tuple[Tokenizer | None, MediaProcessor | None]] | None = None
        self._admission: Admission | None = None
        self._large_bodies: LargeBodies | None = None
        self._watch: asyncio.Task[None] | None = None
        self._began = time.monotonic()
        self._num_starts = 0

    @property
    def engine(self) -> AsyncEngine:
        """The running engine.

        Raises:
            ApiError: 503, with the reason why there is none.
            EngineFrozenError: it gives no sign of life.
        """
        if self.state is State.READY and self._engine is not None:
            if self.is_frozen:
                raise self._frozen()
            return self._engine
        message = {
            State.STARTING: "the engine is starting; try again soon",
            State.DRAINING: "the server is shutting down and takes no new requests",
        }.get(self.state, "the engine has died")
        retry = {State.STARTING: 1, State.DRAINING: DRAINED_RETRY_S}.get(self.state)
        raise ApiError(503, message, type="server_error", code=self.state.value, retry_after_s=retry)

    @property
    def open_engine(self) -> AsyncEngine | None:
        """The engine, whatever the state; None before it was ready."""
        return self._engine

    @property
    def admission(self) -> Admission:
        assert self._admission is not None, "asked before the engine was ready"
        return self._admission

    @property
    def config(self) -> EngineConfig:
        if self._config is None:
            _ = self.engine  # there is none yet, and this says why
        assert self._config is not None
        return self._config

    @property
    def capacity(self) -> wire.Capacity:
        assert self._capacity is not None, "asked before the engine was ready"
        return self._capacity

    @property
    def grammars(self) -> GrammarChecker:
        """Tries grammars before the engine compiles them."""
        if self._grammars is None:
            config = self.config
            vocab_size = config.model_config.vocab_size
            self._grammars = GrammarChecker(config.tokenizer_path, vocab_size, config.eos_token_ids)
        return self._grammars

    @property
    def large_bodies(self) -> LargeBodies:
        assert self._large_bodies is not None, "asked before the engine was ready"
        return self._large_bodies

    @property
    def model_name(self) -> str:
        return self.config.served_model_name

    @property
    def is_restarting(self) -> bool:
        """True while another engine starts in place of one that has died."""
        return self.state is State.STARTING and self.num_restarts > 0

    @property
    def unhealthy_reason(self) -> str | None:
        """Why the service is not healthy; None if it is. A long step is healthy, a process that stands still is not."""
        if self.is_restarting:
            return None
        if self.state in (State.STARTING, State.DEAD):
            return self.state.value
        return "frozen" if self.is_frozen else None

    @property
    def is_frozen(self) -> bool:
        """True while the engine's heartbeat is late."""
        return self.engine_client.silence_s > FROZEN_AFTER_S

    def _frozen(self) -> EngineFrozenError:
        seconds = self.engine_client.silence_s
        return EngineFrozenError(
            f"the engine process stands still: its last sign of life was {seconds:.1f} s ago; try again later, or "
            "elsewhere"
        )

    @property
    def num_restarts(self) -> int:
        return self.engine_client.num_restarts

    def start(self) -> None:
        """Start the engine; ``state`` becomes READY by itself."""
        self._begin()
        self.engine_client.start()

    def _begin(self) -> None:
        self.state = State.STARTING
        self._began = time.monotonic()
        self._num_starts += 1

    def _handle(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Outputs():
                assert self._engine is not None
                self._engine.receive(message)
                self.history.engine_reported(message.stats)
            case wire.Inspected():
                assert self._engine is not None
                self._engine.on_inspected(message)
            case wire.Controlled():
                self._controlled = message
                if self._engine is not None:
                    self._engine.on_controlled(message)
            case wire.Configured():
                self._config = message.config
                self.keeps_states = message.config.keeps_states
                if self._readers is None:
                    self._readers = asyncio.create_task(self._load_readers(message.config))
            case wire.Stage():
                self._report_stage(message.name, message.seconds, message.note)
            case wire.Ready():
                asyncio.create_task(self._become_ready(message.capacity))  # noqa: RUF006 (short, and held by the loop)

    async def _load_readers(self, config: EngineConfig) -> tuple[Tokenizer | None, MediaProcessor | None]:
        """Load the tokenizer and the image processor."""
        tokenizer = None
        if not config.skip_tokenizer_init:
            began = time.monotonic()
            tokenizer = await asyncio.to_thread(_load, config.tokenizer_path)
            self._report_stage("tokenizer", time.monotonic() - began, f"{tokenizer.vocab_size:,} tokens")
        began = time.monotonic()
        media = await asyncio.to_thread(load_processor, config)
        if media is not None:
            self.media.start(media)
            self._report_stage("images", time.monotonic() - began, f"at most {media.max_tokens:,} tokens each")
        return tokenizer, media

    async def _become_ready(self, capacity: wire.Capacity) -> None:
        num_starts = self._num_starts
        assert self._readers is not None
        try:
            tokenizer, media = await self._readers
        except Exception as error:  # a WeftError from the files, or anything from the libraries
            self.engine_client.fail(wire.failure(error))
            return
        if num_starts != self._num_starts or self.state is not State.STARTING:
            return
        inputs = InputProcessor(self.config, tokenizer, capacity.max_model_len, self._numbers, media)
        self._capacity = capacity
        if self._large_bodies is not None:
            self._large_bodies.close()
        self._large_bodies = LargeBodies(
            PromptSetup(self.config, self.settings, capacity.max_model_len, inputs.text_only, self.keeps_states)
        )
        self._engine = AsyncEngine(self.engine_client, inputs, tokenizer, self.token_times, self._numbers)
        if self._controlled is not None:  # as a start after an update brings it
            self._engine.on_controlled(self._controlled)
        if self._admission is None:
            self._admission = Admission(capacity.max_num_seqs, self.settings.max_queue_size, self._counts)
        await self.api_processes.ready()
        if num_starts != self._num_starts or self.state is not State.STARTING:
            return
        self.state = State.READY
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_heartbeat())
        self.became_ready.set()
        self._report_stage("ready", time.monotonic() - self._began, describe(capacity))

    async def _watch_heartbeat(self) -> None:
        """End calls that a frozen engine cannot have seen: those after its last sign of life."""
        while True:
            if self.state is State.READY and self._engine is not None and self.is_frozen:
                last_sign = time.monotonic() - self.engine_client.silence_s
                self._engine.fail_later_than(last_sign, self._frozen())
            await asyncio.sleep(_WATCH_S)

    def _lost(self, failure: wire.Failed, is_restarting: bool) -> None:
        """The engine has ended; another one is started, or the service is over."""
        if self._engine is not None:
            self._engine.die(failure.message)
        self._controlled = None
        if is_restarting:
            self._begin()
            return
        self.state = State.DEAD
        self.failure = failure
        self.ended.set()

    async def drain(self) -> None:
        """Take nothing new, let open requests finish (for ``drain_timeout_s``), then end the engine."""
        if self.state is State.DEAD:
            return
        self.state = State.DRAINING
        self.engine_client.no_restart()
        deadline = time.monotonic() + self.settings.drain_timeout_s
        while self._admission is not None and self._admission.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._engine is not None:
            self._engine.die("the server has shut down")
        self.ended.set()

    async def close(self) -> None:
        """End the engine, whatever its state."""
        if self._watch is not None:
            self._watch.cancel()
        self.render.close()
        self.media.close()
        if self._large_bodies is not None:
            self._large_bodies.close()
        if self._grammars is not None:
            self._grammars.close()
        is_drained = self.state is State.DRAINING and self._engine is not None
        await self.engine_client.stop(GRACE_S if is_drained else 0.0)


def _load(path: Path) -> Tokenizer:
    """Ready for the first call, which would otherwise wait for its template."""
    tokenizer = Tokenizer.load(path)
    tokenizer.template.compile()
    return tokenizer


def describe(capacity: wire.Capacity) -> str:
    """For the one who starts the server."""
    return (
        f"{capacity.max_num_seqs} requests at a time, context of {capacity.max_model_len:,} tokens, "
        f"{capacity.num_pages * capacity.page_size:,} tokens of KV"
    )
