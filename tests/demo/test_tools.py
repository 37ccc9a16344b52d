"""Chats with functions and answers in JSON: right, parseable, and apart from what the evaluation asks."""

import itertools
import json
import re
from random import Random

import pytest
from transformers import AutoTokenizer

from demo import data, evaluate, functions, tools
from weft.assets import MODEL_DIR
from weft.server.output_parser import OutputParser

KINDS = {"integer": int, "string": str, "number": float, "boolean": bool, "array": list}


def check_call(function: dict, functions: dict[str, dict]) -> None:
    parameters = functions[function["name"]]["parameters"]
    arguments = function["arguments"]
    assert list(arguments) == parameters["required"]
    for name, value in arguments.items():
        assert type(value) is KINDS[parameters["properties"][name]["type"]]


def is_said(value: object, text: str) -> bool:
    """Is a value of the text? A judgement, such as a mood or whether something is there, is not spelled out."""
    parts = value if isinstance(value, list) else [value]
    return isinstance(value, bool) or value in list(functions.GOOD) or all(str(part) in text for part in parts)


def test_calls_fit_the_functions_and_hold_what_was_asked():
    rng = Random("calls")
    for _ in range(500):
        messages, schemas = tools.chat(rng, 12)
        functions = {each["function"]["name"]: each["function"] for each in schemas}
        assert len(functions) == len(schemas)
        for asked, message in itertools.pairwise(messages):
            for call in message.get("tool_calls", ()):
                check_call(call["function"], functions)
                if call["function"]["name"] != "final_answer":
                    assert all(is_said(value, asked["content"]) for value in call["function"]["arguments"].values())


def test_rows_with_functions_are_what_the_chat_template_renders_and_the_server_reads():
    rng, found, tokenizer = Random("rows"), 0, AutoTokenizer.from_pretrained(MODEL_DIR)
    for _ in range(50):
        messages, schemas = tools.chat(rng, 12)
        text = tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False)
        learned = re.findall(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", text, re.DOTALL)
        wanted = [m for m in messages if m["role"] == "assistant"]
        assert len(learned) == len(wanted)
        for reply, message in zip(learned, wanted, strict=True):
            parser = OutputParser(
                reasoning=True, in_reasoning=False, tools={s["function"]["name"]: {} for s in schemas}
            )
            parts = parser.feed(reply)
            parts.add(parser.finish())
            calls = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in parts.calls or ()]
            assert calls == [c["function"] for c in message.get("tool_calls", ())]
            assert parts.content == message["content"]
            found += bool(calls)
    assert found > 30


def test_batches_hold_calls_and_objects_once_the_curriculum_is_in_full():
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    call = tokenizer.convert_tokens_to_ids("<tool_call>")
    early, late = data.batch(0, 40, 1000), data.batch(0, 900, 1000)
    assert late[0].shape == (data.LONG.rows, data.LONG.length)
    assert not (early[1] == call).any() and (late[1] == call).sum() > 5
    learned = tokenizer.decode(late[1][late[1] >= 0].tolist()).split("<|im_end|>")
    objects = [reply for reply in learned if reply.startswith("{")]
    assert len(objects) > 5 and all(isinstance(json.loads(reply), dict) for reply in objects[:-1])


def kept(variants: str) -> re.Pattern[str]:
    """The wording that is kept for the evaluation, whatever fills it."""
    return re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(variants.split("|")[-1])))


def test_training_never_uses_a_wording_of_the_evaluation():
    rng = Random("kept")
    asked = [m["content"] for _ in range(1500) for m in tools.chat(rng, 12)[0] if m["role"] == "user"]
    told = [tools.json_answer(rng)[0] for _ in range(3000)]
    for tool in tools.TOOLS:
        assert not any(kept(tool.asks).fullmatch(text) for text in asked), tool.names
    for record in tools.RECORDS:
        assert not any(kept(record.texts).search(text.split("\n")[-1].split(": ")[-1]) for text in told), record.texts


def test_objects_have_the_keys_and_values_that_were_asked_for():
    rng = Random("objects")
    for _ in range(500):
        question, answer = tools.json_answer(rng)
        for key, value in json.loads(answer).items():
            assert key in question
            if not (isinstance(value, list) and isinstance(value[0], dict)):
                assert is_said(value, question)


def test_the_evaluation_is_deterministic_and_its_right_answers_count():
    rows = tools.records()
    assert rows == tools.records() and len(rows) == 100 and sum(row["tools"] is None for row in rows) == 50
    texts = []
    for row in rows:
        if row["tools"] is None:
            texts.append(json.dumps(row["json"]))
        else:
            texts.append("\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in row["calls"]))
    assert evaluate.score_tools(rows, texts) == {"calls": 1.0, "objects": 1.0, "wrong": []}
    figures = evaluate.score_tools(rows, ["Sorry."] * 100)
    assert figures["calls"] == figures["objects"] == 0.0 and len(figures["wrong"]) == 100


@pytest.mark.parametrize("text", ["", "Sorry.", "<tool_call>\n{\n</tool_call>", "so: <tool_call>\n{}\n</tool_call>"])
def test_what_is_no_call(text: str):
    assert evaluate.called(text) in ([], [None])
