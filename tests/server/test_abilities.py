"""The ``weft`` field of a model: what its template, its tokenizer and the settings allow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.server.running import RunningServer
from weft.config import resolve
from weft.engine.input_processor import InputProcessor
from weft.server.abilities import abilities
from weft.server.settings import ServerSettings

TALKS = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
ALWAYS_THINKS = TALKS.replace("Assistant:", "Assistant:<think>")
SWITCHES = ALWAYS_THINKS.replace("Assistant:", "{{ enable_thinking }}Assistant:")
ONLY_READS_THOUGHTS = "{{ '<think>' }}" + TALKS
NOT_A_TALKER = {"tools": False, "reasoning": False, "thinking_switch": False}


def told(template: str | None, media: object = None, **settings: Any) -> dict[str, Any]:
    config = resolve()
    tokenizer = SimpleNamespace(template=SimpleNamespace(text=template)) if template is not None else None
    inputs = InputProcessor(config, None, 100)
    inputs.media = media  # type: ignore[assignment]
    engine = SimpleNamespace(tokenizer=tokenizer, inputs=inputs)
    return abilities(SimpleNamespace(engine=engine, settings=ServerSettings(**settings), config=config))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "settings", "expected"),
    [
        (None, {}, NOT_A_TALKER | {"structured_outputs": False}),
        (TALKS, {}, NOT_A_TALKER | {"structured_outputs": True}),
        (TALKS + "{{ tools }}", {}, {"tools": True, "reasoning": False}),
        (TALKS + "{{ tools }}", {"tool_call_parser": "none"}, {"tools": False}),
        (ALWAYS_THINKS, {}, {"reasoning": True, "thinking_switch": False}),
        (SWITCHES, {}, {"reasoning": True, "thinking_switch": True}),
        (SWITCHES, {"reasoning_parser": "none"}, {"reasoning": False, "thinking_switch": False}),
        (ONLY_READS_THOUGHTS, {}, {"reasoning": False}),
    ],
)
def test_abilities(template: str | None, settings: dict[str, Any], expected: dict[str, bool]) -> None:
    assert told(template, **settings).items() >= expected.items()


def test_images_and_defaults() -> None:
    assert told(TALKS)["images"] is False and told(TALKS, media=object())["images"] is True
    defaults = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": None}
    assert told(TALKS)["defaults"] == defaults, "those of the bundled model's generation_config.json"


def test_models_tell_them(server: RunningServer) -> None:
    model = server.client.get("/v1/models").json()["data"][0]
    assert model["weft"]["tools"] is True and model["weft"]["images"] is False
