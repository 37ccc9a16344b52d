"""Send the bundled model's server prompts that its training never had. Each prompt asks for one call.

python -m benchmarks.tool_prompts --json FILE
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from openai import OpenAI

from tests.server.running import RunningServer
from weft.bench import report


def tool(name: str, does: str, /, **kinds: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    schema = {"type": "object", "properties": properties, "required": list(kinds)}
    return {"type": "function", "function": {"name": name, "description": does, "parameters": schema}}


W = tool("get_weather", "Get the weather for a location.", location="string")
T = tool("set_timer", "Start a timer.", minutes="integer")
S = tool("search", "Search the web.", query="string")
A = tool("add", "Add two numbers.", a="integer", b="integer")
M = tool("send_message", "Send a message.", to="string", text="string")
B = tool("book_table", "Book a table in a restaurant.", city="string", guests="integer")
R = tool("get_route", "Distance between two cities.", start="string", end="string")

CASES = [
    ([W], "What's the weather like in Paris?", ("get_weather", {"location": "Paris"})),
    ([W, T], "Could you tell me the weather in Tokyo please?", ("get_weather", {"location": "Tokyo"})),
    ([W], "weather Berlin", ("get_weather", {"location": "Berlin"})),
    ([T], "I need a timer for 12 minutes.", ("set_timer", {"minutes": 12})),
    ([W, T], "Remind me in 25 minutes.", ("set_timer", {"minutes": 25})),
    ([A], "What is 17 + 25? Use the tool.", ("add", {"a": 17, "b": 25})),
    ([A, W], "Please add 31 and 58.", ("add", {"a": 31, "b": 58})),
    ([M], "Tell Anna that dinner is ready.", ("send_message", {"to": "Anna", "text": "dinner is ready"})),
    ([M, W], "Send a message to Bob: the door is open", ("send_message", {"to": "Bob", "text": "the door is open"})),
    ([B], "I want a table for 4 people in Madrid.", ("book_table", {"city": "Madrid", "guests": 4})),
    ([B, W], "Can you reserve a table for 6 in Rome?", ("book_table", {"city": "Rome", "guests": 6})),
    ([R], "How many kilometres is it from Rome to Milan?", ("get_route", {"start": "Rome", "end": "Milan"})),
    ([S], "Search for hybrid models", ("search", {"query": "hybrid models"})),
    ([S, W], "Look up bicycles on the web.", ("search", {"query": "bicycles"})),
    ([W, R, T], "How is the weather in Vienna?", ("get_weather", {"location": "Vienna"})),
]

C = tool("cancel_order", "Cancel an order.", order_id="integer")
L = tool("lock_door", "Lock a door of the house.", door="string")
F = tool("find_flight", "Find a flight.", origin="string", destination="string")
P = tool("play_video", "Play a video.", title="string")
U = tool("create_user", "Create a user.", name="string", age="integer")

LATER = [  # written before the training of the second weights with calls; some functions no training had
    ([C], "Please cancel order 71.", ("cancel_order", {"order_id": 71})),
    ([C, W], "I changed my mind about order 38, cancel it.", ("cancel_order", {"order_id": 38})),
    ([L], "Lock the garage.", ("lock_door", {"door": "garage"})),
    ([F], "I am looking for a flight from Oslo to Lima.", ("find_flight", {"origin": "Oslo", "destination": "Lima"})),
    ([F, T], "Fly me from Paris to Cairo.", ("find_flight", {"origin": "Paris", "destination": "Cairo"})),
    ([P], "I would like to watch garden.", ("play_video", {"title": "garden"})),
    ([U], "Create a user for Nina, who is 34.", ("create_user", {"name": "Nina", "age": 34})),
    ([W], "Is it raining in Lisbon?", ("get_weather", {"location": "Lisbon"})),
    ([W, S], "Give me the forecast for Madrid.", ("get_weather", {"location": "Madrid"})),
    ([T], "Let me know in 45 minutes.", ("set_timer", {"minutes": 45})),
    (
        [M],
        "Please let Carla know that the train has left.",
        ("send_message", {"to": "Carla", "text": "the train has left"}),
    ),
    ([S], "Search the internet for old maps.", ("search", {"query": "old maps"})),
    ([B], "Dinner for 3 in Lyon, please.", ("book_table", {"city": "Lyon", "guests": 3})),
    ([A], "Call the add function with 64 and 27.", ("add", {"a": 64, "b": 27})),
    ([R, W], "What is the distance between Berlin and Prague?", ("get_route", {"start": "Berlin", "end": "Prague"})),
]


def right(client: OpenAI, choice: str, cases: list[Any]) -> tuple[int, list[dict[str, Any]]]:
    """How many prompts get exactly the call that was asked for, and what the others got."""
    wrong = []
    for tools, prompt, (name, arguments) in cases:
        messages: Any = [{"role": "user", "content": prompt}]
        more: Any = {"tools": tools, "tool_choice": choice}
        reply = client.chat.completions.create(
            model="weft-mini", messages=messages, temperature=0, max_tokens=200, **more
        )
        message = reply.choices[0].message
        calls = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]
        if calls != [(name, arguments)]:
            wrong.append({"prompt": prompt, "calls": calls, "content": message.content})
    return len(cases) - len(wrong), wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    path = report.open_json(str(parser.parse_args().json))
    server = RunningServer("--cpu-cache-gib", "0.2", "--max-num-seqs", "8", module="weft")
    try:
        server.wait_ready()
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600)
        figures: dict[str, Any] = {}
        for name, cases in (("first", CASES), ("later", LATER)):
            for choice in ("auto", "required"):
                count, wrong = right(client, choice, cases)
                figures.setdefault(name, {})[choice] = {"prompts": len(cases), "right": count, "wrong": wrong}
                print(name, choice, count, "of", len(cases))
    finally:
        server.close()
    report.write_json(path, {"figures": figures} | report.provenance("cpu"))


if __name__ == "__main__":
    main()
