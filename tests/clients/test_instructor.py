"""instructor: objects that the bundled model fills, by a forced call or a schema, over both of OpenAI's protocols.

Runs in an environment of its own: make test-clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.clients.conftest import MODEL
from tests.patience import GUARD_S
from tests.server.running import RunningServer

instructor = pytest.importorskip("instructor", reason="instructor is not installed; make test-clients has it")


class Person(BaseModel):
    name: str
    age: int


ASKED: list[Any] = [{"role": "user", "content": "Anna is 34 years old."}]
ANNA = {"name": "Anna", "age": 34}


@pytest.fixture
def openai(mini: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{mini.url}/v1", api_key="none", max_retries=0, timeout=GUARD_S) as client:
        yield client


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_an_object(openai: OpenAI, mode: str) -> None:
    client = instructor.from_openai(openai, mode=instructor.Mode[mode])
    fields: dict[str, Any] = {"model": MODEL, "response_model": Person, "temperature": 0, "max_retries": 0}
    if mode == "RESPONSES_TOOLS":
        found = client.responses.create(input=ASKED, max_output_tokens=100, **fields)
    else:
        found = client.chat.completions.create(messages=ASKED, max_tokens=100, **fields)
    assert found.model_dump() == ANNA


def test_an_object_that_grows(openai: OpenAI) -> None:
    client = instructor.from_openai(openai, mode=instructor.Mode.TOOLS)
    *_, last = client.chat.completions.create_partial(
        model=MODEL, messages=ASKED, response_model=Person, max_tokens=100, temperature=0
    )
    assert last.model_dump() == ANNA
