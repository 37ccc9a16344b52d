"""The served model: the engine process behind it, and whether it can take requests.

Job: start the engine, tell its stages, notice its end, restart it or give up, drain. Owns: the engine, the tokenizer
and the state of the service. Does not know: routes or the shape of requests.

    starting ──▶ ready ──▶ draining ──▶ (exit 0)
       ▲  │        │
       │  └──▶ dead ◀┘   (exit 1; with restart_engine: back to starting)
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable
from typing import Any

from weft.config import EngineConfig
from weft.config.parallelism import is_on_ray
from weft.engine import wire
from weft.engine.async_engine import AsyncEngine, TokenTimes
from weft.engine.inputs import InputProcessor
from weft.engine.launcher import ENGINE_MODULE, EngineProcess
from weft.engine.replicas import ReplicaSet
from weft.engine.views import Snapshot
from weft.server.admission import Admission
from weft.server.errors import ApiError
from weft.server.grammar_check import GrammarChecker
from weft.server.history import History
from weft.server.rendering import RenderPool
from weft.server.settings import ServerSettings
from weft.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

FROZEN_AFTER_S = 3.0
"""The engine beats four times a second; without a beat for so long it stands still."""

DRAINED_RETRY_S = 5
"""When a caller of a server that is leaving may expect another in its place."""

MAX_RESTARTS_IN_A_ROW = 3
_STABLE_AFTER_S = 60.0

Tell = Callable[[str, float, str], None]
"""Reports a stage of the start: name, seconds, note."""


class State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Service:
    """One model, one engine process at a time.

    Args:
        settings: the server's.
        engine_settings: what the user set for the engine.
        tell: hears about stages of the start.
        engine_module: the module that is the engine process.
        verbose: the engine says what it decides.

    Attributes:
        state: see the module.
        keeps_states: the engine caches recurrent states; see ``EngineConfig.keeps_states``.
        ended: set when the service is over; ``failure`` then says why, or is None.
        history: what it did in the last hour, restarts of the engine included.
        token_times: hear when tokens come.
    """

    def __init__(
        self,
        settings: ServerSettings,
        engine_settings: dict[str, Any],
        tell: Tell = lambda name, seconds, note: None,
        engine_module: str = ENGINE_MODULE,
        *,
        verbose: bool = False,
    ) -> None:
        self.settings = settings
        self.state = State.STARTING
        self.ended = asyncio.Event()
        self.failure: wire.Failed | None = None
        self.created = int(time.time())
        self.render = RenderPool(settings.template_timeout_s)
        self.history = History()
        self.token_times: list[TokenTimes] = [self.history]
        self.num_restarts = 0
        self._grammars: GrammarChecker | None = None
        self._engine_settings = engine_settings
        self._engine_module = engine_module
        self._verbose = verbose
        self._tell = tell
        self._process: EngineProcess | ReplicaSet | None = None
        self._engine: AsyncEngine | None = None
        self._config: EngineConfig | None = None
        self.keeps_states = False
        self._capacity: wire.Capacity | None = None
        self._tokenizer: asyncio.Task[Tokenizer | None] | None = None
        self._admission: Admission | None = None
        self._failed: wire.Failed | None = None
        self._began = time.monotonic()
        self._ready_at = 0.0
        self._restarts_in_a_row = 0
        self._is_closing = False

    # -- what handlers ask ---------------------------------------------------------------------------------------

    @property
    def engine(self) -> AsyncEngine:
        """The running engine.

        Raises:
            ApiError: 503, with the reason why there is none.
        """
        if self.state is State.READY and self._engine is not None:
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
        if self._process is None or self._process.silence_s > FROZEN_AFTER_S:
            return "frozen"
        return None

    @property
    def engine_pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def replicas(self) -> dict[str, dict[str, int]] | None:
        """Figures of each replica; None if there is one engine."""
        return self._process.figures() if isinstance(self._process, ReplicaSet) else None

    # -- the engine's life ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine process; ``state`` becomes READY by itself."""
        self.state = State.STARTING
        self._began = time.monotonic()
        self._failed = None
        settings = self._engine_settings
        many = (settings.get("data_parallel_size") or 1) > 1 or is_on_ray(settings)
        self._process = (ReplicaSet if many else EngineProcess)(
            self._engine_settings, self._hear, self._on_exit, self._engine_module, verbose=self._verbose
        )

    def _hear(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Outputs():
                assert self._engine is not None
                self._engine.receive(message)
                self.history.engine_reported(message.stats)
            case Snapshot():
                assert self._engine is not None
                self._engine.show(message)
            case wire.Configured():
                self._config = message.config
                self.keeps_states = message.config.keeps_states
                if self._tokenizer is None:
                    self._tokenizer = asyncio.create_task(self._load_tokenizer(message.config))
            case wire.Stage():
                self._tell(message.name, message.seconds, message.note)
            case wire.Ready():
                asyncio.create_task(self._become_ready(message.capacity))  # noqa: RUF006 (short, and held by the loop)
            case wire.Failed():
                self._failed = message

    async def _load_tokenizer(self, config: EngineConfig) -> Tokenizer | None:
        if config.skip_tokenizer_init:
            return None
        began = time.monotonic()
        tokenizer = await asyncio.to_thread(Tokenizer.load, config.tokenizer_path)
        self._tell("tokenizer", time.monotonic() - began, f"{tokenizer.vocab_size:,} tokens")
        return tokenizer

    async def _become_ready(self, capacity: wire.Capacity) -> None:
        process = self._process
        assert self._tokenizer is not None and process is not None
        try:
            tokenizer = await self._tokenizer
        except Exception as error:  # a WeftError from the files, or anything from the libraries
            self._failed = wire.failure(error)
            process.kill()
            return
        if process is not self._process or self.state is not State.STARTING:
            return
        inputs = InputProcessor(self.config, tokenizer, capacity.max_model_len)
        self._capacity = capacity
        self._engine = AsyncEngine(process, inputs, tokenizer, self.token_times)
        if self._admission is None:
            self._admission = Admission(capacity.max_num_seqs, self.settings.max_queue_size)
        self._ready_at = time.monotonic()
        self.state = State.READY
        self._tell("ready", self._ready_at - self._began, _describe(capacity))

    def _on_exit(self, status: int) -> None:
        """The engine process has ended."""
        was_ready = self.state is State.READY
        if self._is_closing:
            return
        failure = self._failed or wire.Failed(f"the engine process ended unexpectedly ({_ending(status)})")
        if self._engine is not None:
            self._engine.die(failure.message)
        if time.monotonic() - self._ready_at > _STABLE_AFTER_S:
            self._restarts_in_a_row = 0
        may_restart = self.settings.restart_engine and self._restarts_in_a_row < MAX_RESTARTS_IN_A_ROW
        if may_restart and (was_ready or self.num_restarts) and self.state is not State.DRAINING:
            self._restarts_in_a_row += 1
            self.num_restarts += 1
            logger.error("%s; another one is started", failure.message)
            self.start()
            return
        self.state = State.DEAD
        self.failure = failure
        self.ended.set()

    # -- the end -------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Take nothing new, let open requests finish (for ``drain_timeout_s``), then end the engine."""
        if self.state is State.DEAD:
            return
        self.state = State.DRAINING
        deadline = time.monotonic() + self.settings.drain_timeout_s
        while self._admission is not None and self._admission.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._engine is not None:
            self._engine.die("the server has shut down")
        self.ended.set()

    async def close(self) -> None:
        """End the engine process, whatever its state."""
        self._is_closing = True
        self.render.close()
        if self._grammars is not None:
            await self._grammars.close()
        if self._process is None:
            return
        if self.state is State.DRAINING and self._engine is not None:
            await self._process.stop()
        else:
            await self._process.stop(grace_s=0.0)


def _describe(capacity: wire.Capacity) -> str:
    return (
        f"{capacity.max_num_seqs} requests at a time, context of {capacity.max_model_len:,} tokens, "
        f"{(capacity.num_pages - 1) * capacity.page_size:,} tokens of KV"
    )


def _ending(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"
