"""The sockets between server and engine over TCP, and another machine's clock."""

from __future__ import annotations

import asyncio
import time
from array import array
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.media import Prompt
from tests.patience import GUARD_S
from weft.engine import wire
from weft.engine.channel import EngineChannel, ServerChannel
from weft.engine.ray_engine import ClockOffset
from weft.errors import EngineDeadError
from weft.messages import RowSampling
from weft.request import RequestSpec


def test_only_who_has_the_key_is_heard() -> None:
    async def main() -> list[bytes]:
        heard: list[bytes] = []
        server = ServerChannel("127.0.0.1")
        server.receive(heard.append)
        other = ServerChannel("127.0.0.1")
        strangers = [EngineChannel(replace(server.address, key=key)) for key in (None, other.address.key)]
        for stranger in strangers:
            stranger._outputs.linger = 0
            stranger.send(wire.Stage("stranger", 0.0))
        engine = EngineChannel(server.address)
        engine.send(wire.Stage("engine", 1.0))
        server.send(wire.FinishRequests(["x"]))
        while not heard:
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(engine.receive, 10_000) == [wire.FinishRequests(["x"])]
        assert not any(stranger._requests.poll(50) for stranger in strangers)
        server.close()
        deadline = time.monotonic() + GUARD_S
        with pytest.raises(EngineDeadError, match="the connection to the server has broken"):
            while time.monotonic() < deadline:
                await asyncio.to_thread(engine.receive, 10)
        for channel in (engine, other, *strangers):
            channel.close()
        return heard

    assert [wire.decode_from_engine(content) for content in asyncio.run(main())] == [wire.Stage("engine", 1.0)]


def test_on_one_machine_the_sockets_are_files(tmp_path: Path) -> None:
    async def main() -> None:
        channel = ServerChannel(tmp_path)
        assert channel.address.requests == f"ipc://{tmp_path}/requests" and channel.address.key is None
        channel.close()

    asyncio.run(main())


def test_all_that_was_sent_arrives_also_from_an_engine_that_ends(tmp_path: Path) -> None:
    """ZeroMQ tells once of several messages; and the last one of an engine that fails says why."""
    stages = [wire.Stage(str(i), 0.0) for i in range(40)]

    async def main() -> list[bytes]:
        heard: list[bytes] = []
        server = ServerChannel(tmp_path)
        engine = EngineChannel(server.address)
        for stage in stages:
            engine.send(stage)
        await asyncio.to_thread(engine.close)
        server.receive(heard.append)
        deadline = time.monotonic() + GUARD_S
        while len(heard) < len(stages) and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
        server.close()
        return heard

    assert [wire.decode_from_engine(content) for content in asyncio.run(main())] == stages


def test_pixels_of_several_completions_are_sent_once() -> None:
    prompt = Prompt().text(3).image(8, 8, 1).text(2).image(4, 4, 2)
    other = Prompt().image(8, 8, 1)
    specs = [RequestSpec(f"r{i}", array("I", p.token_ids), RowSampling(), 4, arrival=i, media=p.media)
             for i, p in enumerate((prompt, prompt, other))]  # fmt: skip
    messages = [*specs, wire.FinishRequests(["x"])]
    content = wire.encode_to_engine(messages)
    assert wire.decode_to_engine(content) == messages
    pixels = sum(len(item.pixel_values) for item in prompt.media)
    assert pixels < len(content) < 1.2 * pixels


def test_another_clock() -> None:
    clock = ClockOffset()
    assert clock.seconds == 0.0
    clock.note(asked=10.0, theirs=10.5, answered=11.0)
    assert clock.seconds == 0.0, "it may be the same clock"
    clock.note(asked=20.0, theirs=520.2, answered=20.4)
    assert clock.seconds == pytest.approx(-500.0, abs=0.21)
    clock.note(asked=30.0, theirs=530.05, answered=30.1)
    assert clock.seconds == pytest.approx(-500.0, abs=0.06)
    update = wire.Update("r", [1], first_scheduled=501.0, first_token=502.0)
    assert wire.moved(update, -500.0) == replace(update, first_scheduled=1.0, first_token=2.0)
    ended = replace(update, finished=503.0)
    assert wire.moved(ended, -500.0) == replace(ended, first_scheduled=1.0, first_token=2.0, finished=3.0)
