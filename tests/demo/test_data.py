"""The training data and the evaluation: deterministic, disjoint, and arithmetically right."""

import json
import re
from functools import cache
from random import Random

import numpy as np
import pytest
from transformers import AutoTokenizer

from demo import arithmetic, data, make_eval, problems, templates, words
from tests.whole import RUNS_LONG
from weft.assets import EVAL_PATH, MODEL_DIR, extract_answer

NUM_PROBLEMS = 8000 if RUNS_LONG else 3000
SIGNS = {"×": "*", "÷": "//"}


@pytest.fixture(scope="module")
def evaluation() -> list[dict]:
    return [json.loads(line) for line in EVAL_PATH.read_text().splitlines()]


@cache
def sample(count: int) -> list[problems.Problem]:
    rng = Random("test")
    return [data.problem_for(rng, 1.0) for _ in range(count)]


def test_same_seed_same_batch():
    first, again, other = data.batch(5, 700, 1000), data.batch(5, 700, 1000), data.batch(6, 700, 1000)
    assert np.array_equal(first[0], again[0]) and np.array_equal(first[1], again[1])
    assert not np.array_equal(first[0], other[0])


def test_evaluation_is_the_frozen_one(evaluation):
    assert evaluation == make_eval.records()
    assert len(evaluation) == 200
    assert sum(row["unseen_template"] for row in evaluation) == 60


def test_training_never_draws_an_evaluation_problem(evaluation):
    held = {(row["template"], tuple(row["numbers"])) for row in evaluation}
    drawn = sample(NUM_PROBLEMS)
    assert not held & {(p.template, p.numbers) for p in drawn}
    assert all(p.split == problems.TRAIN for p in drawn)
    assert all(problems.Problem(t, n, "", "", 0, 0).split == problems.EVAL for t, n in held)


def test_training_never_draws_a_held_out_template():
    names = {p.template for p in sample(NUM_PROBLEMS)}
    assert not names & {t.name for t in [*templates.HELD_OUT, *templates.DEV_HELD_OUT]}
    assert len([n for n in names if n.startswith("many")]) >= 60


def test_training_never_asks_a_held_out_question_in_its_words(evaluation):
    """Not even with other numbers and names: the stories are free, so their wording is compared."""
    names = {*(name for name, _ in templates.NAMES), *words.NAMES, *templates.THINGS, *map(words.plural, words.NOUNS)}

    def skeleton(question: str) -> tuple[str, ...]:
        return tuple("_" if w in names or w.isdigit() else w for w in re.findall(r"\w+", question))

    unseen = {skeleton(row["messages"][-1]["content"]) for row in evaluation if row["unseen_template"]}
    assert not unseen & {skeleton(p.question) for p in sample(NUM_PROBLEMS)}


def test_examples_are_training_problems_of_other_templates(evaluation):
    for row in evaluation:
        assert len(row["messages"]) == 2 * make_eval.EXAMPLES + 1
        asked = [m["content"] for m in row["messages"] if m["role"] == "user"]
        assert len(set(asked)) == len(asked)


def test_every_written_step_is_right():
    for problem in sample(3000):
        for line in problem.reply.split("\n")[:-1]:
            check_line(line)
        assert extract_answer(problem.reply) == str(problem.answer)


def check_line(line: str) -> None:
    """Recompute a line such as `633 - 128: 633 - 100 = 533, - 20 = 513, - 8 = 505`."""
    head, _, parts = line.partition(": ")
    task, _, direct = head.partition(" = ")
    value = evaluate(task)
    assert int(direct or line.rsplit(" = ", 1)[1]) == value
    left = ""
    for part in parts.split(", ") if parts else []:
        expression, shown = part.split(" = ")
        assert evaluate(left + expression) == int(shown)
        left = shown + " "


def evaluate(expression: str) -> int:
    assert re.fullmatch(r"[\d +\-×÷]+", expression), expression
    for sign, operator in SIGNS.items():
        expression = expression.replace(sign, operator)
    return eval(expression)  # digits and signs only, as checked above


@pytest.mark.parametrize(
    ("op", "a", "b", "written"),
    [
        ("+", 347, 286, "347 + 286: 500 + 120 + 13 = 633"),
        ("-", 633, 128, "633 - 128: 633 - 100 = 533, - 20 = 513, - 8 = 505"),
        ("*", 47, 6, "47 × 6: 240 + 42 = 282"),
        ("*", 7, 6, "7 × 6 = 42"),
        ("/", 56, 7, "56 ÷ 7 = 8"),
        ("+", 300, 200, "300 + 200 = 500"),
    ],
)
def test_written_form(op, a, b, written):
    assert arithmetic.write(op, a, b) == written


def test_rows_are_what_the_chat_template_renders():
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    ids, labels = data.batch(0, 900, 1000)
    assert ids.shape == labels.shape == (data.LONG.rows, data.LONG.length)
    row = ids[0][ids[0] != tokenizer.pad_token_id]
    text = tokenizer.decode(row.tolist())
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", text, re.DOTALL)
    rendered = tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in turns], tokenize=False)
    assert tokenizer(rendered)["input_ids"] == row.tolist()
    learned = tokenizer.decode(labels[0][labels[0] >= 0].tolist())
    assert learned == "".join(content + "<|im_end|>" for role, content in turns if role == "assistant")


def test_prompts_fit_the_trained_length(evaluation):
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in evaluation]
    assert max(len(ids) for ids in tokenizer(texts)["input_ids"]) < 1000
