"""smolagents: an agent over the bundled model calls a function, reads its result, and answers by a call.

Runs in an environment of its own: make test-clients.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MODEL
from tests.server.running import RunningServer

smolagents = pytest.importorskip("smolagents", reason="smolagents is not installed; make test-clients has it")

SYSTEM = "Use the tools to answer the question."
"""In place of smolagents' own, which is longer than the model's context."""


def test_an_agent(mini: RunningServer) -> None:
    asked = []

    @smolagents.tool  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """Get the weather in a city.

        Args:
            city: the city
        """
        asked.append(city)
        return '{"degrees": 31, "sky": "cloudy"}'

    model = smolagents.OpenAIModel(
        MODEL,
        api_base=f"{mini.url}/v1",
        api_key="none",
        client_kwargs={"max_retries": 0},
        temperature=0,
        max_tokens=100,
    )
    templates: Any = smolagents.ToolCallingAgent(tools=[], model=model).prompt_templates | {"system_prompt": SYSTEM}
    agent = smolagents.ToolCallingAgent(tools=[get_weather], model=model, prompt_templates=templates, max_steps=4)
    answer = agent.run("What is the weather in Oslo?")
    assert asked == ["Oslo"] and "31" in answer and "cloudy" in answer
