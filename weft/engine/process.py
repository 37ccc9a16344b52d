"""The engine process: ``python -m weft.engine.process``, started by the server.

Job: start the engine with the settings on standard input, then receive requests from one socket, run steps, and send
changes through the other. Owns: the life of this process. Does not know: text, HTTP.

The process ends with its parent: the kernel kills it, and its heartbeat thread checks once more. It ignores SIGINT and
SIGTERM, because the server lets open requests finish first and then sends ``Shutdown``.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from weft.engine import wire
from weft.engine.channel import EngineChannel, EngineStart
from weft.errors import EngineDeadError, WeftError
from weft.executor.rank_process import begin_start
from weft.processes.collector import collector_off
from weft.processes.heartbeat import Heartbeat
from weft.processes.lifeline import die_with_parent, leave_signals_to_parent
from weft.processes.log_format import LogFormatter
from weft.processes.log_writer import configure_logging
from weft.processes.preload import import_torch, import_torch_for_gpu, load_torch_libraries
from weft.request import FinishReason, Request, RequestSpec
from weft.stats import EngineStats

if TYPE_CHECKING:
    from weft.engine.controls import Controls
    from weft.engine.rollouts import Rollouts
    from weft.engine.snapshot import Snapshot

logger = logging.getLogger(__name__)

MAX_BROKEN_STEPS = 3
"""Number of consecutive failed steps that end the process, since the device or the program is beyond recovery."""

PREFIXES_EVERY_S = 1.0
"""Seconds between two messages about cached prefixes."""

_IDLE_MS = 1000


class Core(Protocol):
    """The interface of an engine core for the loop; see ``weft.engine.core.EngineCore``."""

    def add(self, request: Request) -> None: ...
    def finish(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> bool: ...
    def step(self) -> list[Request]: ...
    def stats(self) -> EngineStats: ...
    def snapshot(self, tokens_per_node: int) -> Snapshot: ...
    def cached_prefixes(self, known_version: int) -> tuple[int, wire.CachedPrefixes]: ...
    def reset_prefix_cache(self) -> bool: ...
    def shutdown(self) -> None: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def rollouts(self) -> Rollouts: ...


class EngineLoop:
    """The loop: receive messages, run steps, send messages."""

    def __init__(
        self, core: Core, channel: EngineChannel, *, reports_prefixes: bool = False, enables_sleep: bool = False
    ) -> None:
        self._core = core
        self._prefixes_due = 0.0 if reports_prefixes else math.inf
        self._prefixes_version = -1
        self._channel = channel
        self._sent: dict[str, tuple[int, int]] = {}  # tokens and prompt log probabilities sent, by open request
        self._broken_steps = 0
        self._enables_sleep = enables_sleep
        self._controls: Controls | None = None

    def _control(self, message: wire.Control) -> None:
        if self._controls is None:
            from weft.engine.controls import Controls

            send, changed = self._channel.send, self._send_changed
            self._controls = Controls(self._core, send, changed, enables_sleep=self._enables_sleep)
        self._controls.begin(message)

    def run(self) -> None:
        """Run until ``Shutdown``. Raises the exception of a step if ``MAX_BROKEN_STEPS`` steps failed in a row, or if
        no step can run any more."""
        while True:
            for message in self._channel.receive(0 if self._core.has_work else _IDLE_MS):
                if isinstance(message, wire.Shutdown):
                    return
                if isinstance(message, wire.DrainReplica | wire.StartReplica):
                    continue  # for a set of replicas
                self._handle(message)
            if self._core.has_work:
                self._step()
            if self._controls is not None:
                self._controls.poll()
            if time.monotonic() >= self._prefixes_due:
                self._report_prefixes()

    def _report_prefixes(self) -> None:
        """Report cached prefixes to a router, at most once a second and for at most a hundredth of the time."""
        began = time.monotonic()
        version, prefixes = self._core.cached_prefixes(self._prefixes_version)
        if version != self._prefixes_version:
            self._prefixes_version = version
            self._channel.send(prefixes)
        now = time.monotonic()
        self._prefixes_due = now + max(PREFIXES_EVERY_S, 100 * (now - began))

    def _handle(
        self, message: RequestSpec | wire.FinishRequests | wire.Inspect | wire.ResetPrefixCache | wire.Control
    ) -> None:
        """Handle a message. A message that fails must not end the running requests."""
        try:
            self._apply(message)
        except EngineDeadError:
            raise
        except Exception:
            logger.exception("a message could not be carried out")
            if isinstance(message, RequestSpec):
                self._refuse(message.request_id)

    def _refuse(self, request_id: str) -> None:
        """End a request that cannot be accepted with an error."""
        self._sent.pop(request_id, None)
        self._channel.send(wire.Outputs([wire.Update(request_id, [], finish_reason="error")], self._core.stats()))

    def _apply(
        self, message: RequestSpec | wire.FinishRequests | wire.Inspect | wire.ResetPrefixCache | wire.Control
    ) -> None:
        if isinstance(message, wire.Inspect):
            self._channel.send(wire.Inspected(message.number, self._core.snapshot(message.tokens_per_node)))
            return
        if isinstance(message, wire.ResetPrefixCache):
            self._channel.send(wire.PrefixCacheReset(self._reset_prefix_cache()))
            return
        if isinstance(message, wire.Control):
            self._control(message)
            return
        if isinstance(message, RequestSpec):
            self._sent[message.request_id] = (0, 0)
            self._core.add(Request.of(message))
            return
        for request_id in message.request_ids:
            self._sent.pop(request_id, None)
            self._core.finish(request_id, message.reason)
        self._channel.send(wire.Outputs([], self._core.stats()))  # so that the gauges fall even if no step follows

    def _reset_prefix_cache(self) -> bool:
        """Reset the prefix cache. A step launched beyond the end of the last request holds pages, so its results are
        processed first."""
        while not self._sent and self._core.has_work:
            self._step()
        return self._core.reset_prefix_cache()

    def _step(self) -> None:
        try:
            changed = self._core.step()
        except EngineDeadError:
            raise
        except Exception:
            self._broken_steps += 1
            logger.exception("a step broke; its requests end with an error")
            if self._broken_steps >= MAX_BROKEN_STEPS:
                raise
            return
        if any(request.finish_reason != "error" for request in changed):
            self._broken_steps = 0
        self._send_changed(changed)

    def _send_changed(self, changed: list[Request]) -> None:
        updates = [self._update(request) for request in changed if request.request_id in self._sent]
        if updates:
            self._channel.send(wire.Outputs(updates, self._core.stats()))

    def _update(self, request: Request) -> wire.Update:
        """The changes of a request that the server does not have yet."""
        num_tokens, num_prompt_logprobs = self._sent[request.request_id]
        # A preempted request computes its prompt log probabilities again before its next token; they are the same.
        if request.finish_reason is None:
            self._sent[request.request_id] = (len(request.output_token_ids), len(request.prompt_logprobs))
        else:
            del self._sent[request.request_id]
        return wire.Update(
            request_id=request.request_id,
            token_ids=request.output_token_ids[num_tokens:],
            finish_reason=self._finish_reason(request),
            stop_reason=request.stop_reason,
            num_cached_tokens=request.num_cached_tokens,
            first_scheduled=request.times.first_scheduled,
            first_token=request.times.first_token,
            finished=request.times.finished,
            num_preemptions=request.num_preemptions,
            logprobs=request.logprobs[num_tokens:] if request.logprobs else [],
            prompt_logprobs=request.prompt_logprobs[num_prompt_logprobs:],
            cache_report=request.cache_report if num_tokens == 0 else None,
            num_draft_tokens=request.num_draft_tokens,
            num_accepted_tokens=request.num_accepted_tokens,
            no_drafts_because=request.no_drafts_because,
            weight_version=request.weight_spans[-1][1],
        )

    def _finish_reason(self, request: Request) -> FinishReason | Literal["unavailable"] | None:
        """The reason of an end. The core ends requests with an error and the reason if no request can run."""
        if self._controls is None or request.finish_reason != "error":
            return request.finish_reason
        return "unavailable" if request.stop_reason == self._core.rollouts.unavailable else "error"


Start = Callable[[EngineStart, EngineChannel], tuple[Core, wire.Capacity]]
"""Makes the core, reporting stages of the start. Returns it with its capacity."""


@collector_off()
def start_core(start: EngineStart, channel: EngineChannel) -> tuple[Core, wire.Capacity]:
    """Make the real engine."""
    from weft.config import resolve

    ranks = begin_start(start.settings)
    began = time.monotonic()
    import_torch_for_gpu(start.settings)
    early = time.monotonic() - began
    config = resolve(**start.settings)
    channel.send(wire.Configured(config))
    began = time.monotonic() - early
    import_torch()
    import weft.runner.model_runner  # noqa: F401 (what every executor runs)
    from weft.engine.core import EngineCore

    channel.send(wire.Stage("libraries", time.monotonic() - began, "torch and the model code"))
    began = time.monotonic()
    core = EngineCore(config, ranks)
    plan = core.plan
    channel.send(
        wire.Stage("engine", time.monotonic() - began, f"{config.dtype} on {config.device}: {_stages(core.startup)}")
    )
    capacity = wire.Capacity(
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        num_pages=plan.num_pages - 1,
        page_size=config.page_size,
        num_slots=max(0, plan.num_slots - 1),
    )
    return core, capacity


def _stages(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())


def main(make: Start = start_core) -> int:
    """Run the engine process until it is asked to stop. Returns its exit status."""
    load_torch_libraries()
    start = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineStart)
    die_with_parent(start.parent_pid)
    leave_signals_to_parent()
    level = logging.INFO if start.verbose else logging.WARNING
    log = configure_logging(LogFormatter(start.log_json, "engine"), level)
    heartbeat = Heartbeat(Path(start.heartbeat), start.parent_pid)
    heartbeat.start()
    channel = EngineChannel(start.address)
    try:
        core, capacity = make(start, channel)
        gc.freeze()  # permanent objects need not be scanned by every collection
        channel.send(wire.Ready(capacity))
        reports_prefixes = (start.settings.get("data_parallel_size") or 1) > 1
        enables_sleep = bool(start.settings.get("enable_sleep_mode"))
        EngineLoop(core, channel, reports_prefixes=reports_prefixes, enables_sleep=enables_sleep).run()
    except Exception as error:
        if not isinstance(error, WeftError):
            logger.exception("the engine ends")
        channel.send(wire.failure(error))
        return wire.FAILED_STATUS
    finally:
        channel.close()
        log.close()
    core.shutdown()
    return 0


if __name__ == "__main__":
    if (status := main()) != 0:
        os._exit(status)  # a device that waits for a dead rank would keep the interpreter from ending
