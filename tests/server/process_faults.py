"""Faults of processes: an engine or a server that is killed, stopped or asked to leave; see ``faults.py``."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from tests.patience import GUARD_S, stretched
from tests.server.fault_callers import (
    Figures,
    Reply,
    answer,
    ask,
    held,
    serving,
    settled,
    story,
)
from tests.server.running import RunningServer, is_alive, wait_until


def killed_engine(server: RunningServer, count: int) -> Figures:
    """The engine is killed under load; every stream ends with an error, and another engine is there soon.

    The server restarts its engine.
    """
    failed_s, ready_s = [], []
    for _ in range(count):

        async def main() -> list[Reply]:
            streams = [asyncio.create_task(ask(server, story(i, max_tokens=400))) for i in range(32)]
            await asyncio.to_thread(wait_until, lambda: held(server)["completions"] == 32, 5.0)
            nonlocal killed
            killed = time.monotonic()
            os.kill(server.engine_pid, signal.SIGKILL)
            return await asyncio.gather(*streams)

        killed = 0.0
        replies = asyncio.run(main())
        server.wait_ready()
        ready_s.append(round(time.monotonic() - killed, 2))
        assert all("signal 9" in (r.error["message"] if r.status == 200 else r.text) for r in replies)
        failed_s.append(round(max(r.ended_at for r in replies) - killed, 3))
    assert max(failed_s) < stretched(1.0), failed_s
    assert max(ready_s) < stretched(10.0), ready_s
    assert answer(server).endswith("42")
    return {"kills": count, "streams": 32, "all_failed_after_s": failed_s, "ready_again_after_s": ready_s}


def killed_server(count: int) -> Figures:
    """The server is killed under load; nothing of it is left."""
    gone_s = []
    for _ in range(count):
        with serving() as server:
            engine = server.engine_pid

            async def main() -> None:
                streams = [asyncio.create_task(ask(server, story(i))) for i in range(16)]
                await asyncio.sleep(0.3)
                server.process.kill()
                await asyncio.gather(*streams, return_exceptions=True)

            asyncio.run(main())
            gone_s.append(round(wait_until(lambda pid=engine: not is_alive(pid), 3.0), 3))
    return {"kills": count, "engine_gone_after_s": gone_s}


def stopped_engine(server: RunningServer) -> Figures:
    """The engine stands still for a while: /health says so, and what was under way goes on afterwards."""
    before = held(server)

    async def main() -> tuple[float, float, list[Reply]]:
        begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(ask(server, story(i), on_begin=begun.release)) for i in range(16)]
        for _ in streams:  # one without a token may be refused, since the engine may not have seen it
            await begun.acquire()
        engine = server.engine_pid
        os.kill(engine, signal.SIGSTOP)
        try:
            sick = await asyncio.to_thread(wait_until, lambda: _health(server) == 503, 5.0)
        finally:
            os.kill(engine, signal.SIGCONT)
        well = await asyncio.to_thread(wait_until, lambda: _health(server) == 200, 2.0)
        return sick, well, await asyncio.gather(*streams)

    sick, well, replies = asyncio.run(main())
    assert all(r.text.endswith("data: [DONE]\n\n\r\n0\r\n\r\n") and r.finish_reasons == ["length"] for r in replies)
    return {"unhealthy_after_s": round(sick, 2), "healthy_after_s": round(well, 2),
            "idle_after_s": settled(server, before)}  # fmt: skip


def _health(server: RunningServer) -> int:
    return server.client.get("/health").status_code


def terminated(count: int) -> Figures:
    """SIGTERM under load: what is open ends well, what is new is refused, and the process leaves with 0."""
    with serving() as server:

        async def main() -> tuple[list[Reply], Reply]:
            streams = [asyncio.create_task(ask(server, story(i))) for i in range(count)]
            await asyncio.to_thread(wait_until, lambda: held(server)["completions"] == count, 5.0)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(wait_until, lambda: server.client.get("/ready").status_code == 503, 5.0)
            refused = await ask(server, story(-1))
            return await asyncio.gather(*streams), refused

        replies, refused = asyncio.run(main())
        assert all(r.status == 200 and r.finish_reasons == ["length"] and "[DONE]" in r.text for r in replies)
        assert refused.status == 503 and '"draining"' in refused.text
        assert server.process.wait(GUARD_S) == 0
    return {"open_streams": count, "ended_well": len(replies)}
