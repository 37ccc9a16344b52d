"""The training data: chats of solved problems, as rows of tokens, batch by batch.

Owns the mix of problems, the curriculum, the buckets (rows, length) and the loss mask.
Knows nothing of the model. Batch number i is a function of (seed, i) alone: any worker can make it,
training can resume at any batch, and two runs see the same data.
"""

import re
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from demo import about, problems, templates, tools
from demo.problems import TRAIN, Problem

MODEL_DIR = Path(__file__).parent.parent / "weft" / "assets" / "weft-mini"
IGNORE = -100
EMPTY_THINKING = "<think>\n\n</think>\n\n"


class Bucket(NamedTuple):
    """The shape of a batch: few fixed shapes, so that each is compiled and captured once."""

    rows: int
    length: int
    turns: int  # the most turns a row may hold


SHORT, LONG = Bucket(256, 256, 8), Bucket(56, 1216, 12)
CURRICULUM = (0.03, 0.10)  # before the first, bare calculations; from the second, every kind in full


def bucket_of(index: int, total: int) -> Bucket:
    """The bucket of a batch: bare sums in short rows, then three long batches to a short one."""
    return SHORT if index < CURRICULUM[0] * total or index % 4 == 3 else LONG


TOOL_CHATS, JSON_TURNS = 0.3, 0.1  # shares, once every kind of problem is in full


def turn(rng: Random, progress: float) -> tuple[str, str]:
    """One question and its answer. `progress` from 0 to 1 is the place in the curriculum."""
    if rng.random() < 0.06:
        return about.draw(rng)
    if progress > CURRICULUM[1] and rng.random() < JSON_TURNS:
        return tools.json_answer(rng)
    problem = problem_for(rng, progress)
    return problem.question, problem.reply


def problem_for(rng: Random, progress: float) -> Problem:
    """A training problem: bare calculations at first, then one step, then many, half of them freely worded."""
    while True:
        problem = _draw(rng, progress)
        if problem.split == TRAIN:
            return problem


def _draw(rng: Random, progress: float) -> Problem:
    first, full = CURRICULUM
    many = 0.8 * min(1.0, max(0.0, (progress - first) / (full - first)))
    if rng.random() < many:
        if (kind := rng.random()) < 0.75:
            return problems.story(rng)
        template = problems.chain(rng) if kind < 0.83 else rng.choice(templates.MANY_STEPS)
    elif progress > first / 2 and rng.random() < 0.4:
        template = rng.choice(templates.ONE_STEP)
    else:
        template = rng.choice(templates.BARE)
    return problems.draw(template, rng, wide=template not in templates.BARE and rng.random() < 0.5)


def batch(seed: int, index: int, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and labels of batch `index` out of `total`, int16 [rows, length]; labels hold IGNORE where given."""
    rng = Random(f"{seed}/{index}")
    rows, length, turns = bucket_of(index, total)
    chats = [_chat(rng, turns, index / total) for _ in range(rows)]
    texts = [text for chat in chats for pair in chat for text in pair]
    encoded = iter(_tokenizer().encode_batch_fast(texts, add_special_tokens=False))
    ids = np.full((rows, length), _pad(), np.int16)
    labels = np.full((rows, length), IGNORE, np.int16)
    for row, chat in enumerate(chats):
        _fill(ids[row], labels[row], [(next(encoded).ids, next(encoded).ids) for _ in chat])
    return ids, labels


def _chat(rng: Random, turns: int, progress: float) -> list[tuple[str, str]]:
    """The turns of one chat as (given text, learned text), split where the loss begins."""
    if progress > CURRICULUM[1] and turns == LONG.turns and rng.random() < TOOL_CHATS:
        return _tool_chat(rng, turns)
    pairs = []
    for _ in range(turns):
        question, answer = turn(rng, progress)
        pairs.append((f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", f"{answer}<|im_end|>"))
    if rng.random() < 0.1:  # enable_thinking=False opens the last reply with an empty block
        given, learned = pairs[-1]
        pairs[-1] = (given + EMPTY_THINKING, learned)
    if rng.random() < 0.05:
        given, learned = pairs[0]
        pairs[0] = ("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + given, learned)
    return pairs


def _tool_chat(rng: Random, turns: int) -> list[tuple[str, str]]:
    """A chat with functions, as the chat template writes it, in the same parts; problems fill it up."""
    messages, functions = tools.chat(rng, turns)
    if messages[-1].get("tool_calls") is None:
        for _ in range(turns // 2):
            problem = problem_for(rng, 1.0)
            messages += [{"role": "user", "content": problem.question}, {"role": "assistant", "content": problem.reply}]
    text = _chat_tokenizer().apply_chat_template(messages, tools=functions, tokenize=False)
    parts = re.findall(r"(.*?<\|im_start\|>assistant\n)(.*?<\|im_end\|>)\n", text, re.DOTALL)
    assert "".join(given + learned + "\n" for given, learned in parts) == text
    joined, context = [], ""
    for (given, learned), message in zip(parts, (m for m in messages if m["role"] == "assistant"), strict=True):
        if message.get("given"):
            context += given + learned + "\n"
        else:
            joined.append((context + given, learned))
            context = ""
    return joined


def _fill(ids: np.ndarray, labels: np.ndarray, chat: list[tuple[list[int], list[int]]]) -> None:
    """Write as many whole turns into a row as fit; the newline after a turn is given, not learned."""
    at, newline = 0, _tokenizer().token_to_id("Ċ")
    for given, learned in chat:
        end = at + len(given) + len(learned)
        if end > len(ids):
            return
        ids[at:end] = given + learned
        labels[at + len(given) : end] = learned
        at = end
        if at < len(ids):
            ids[at] = newline
            at += 1


@cache
def _chat_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def _pad() -> int:
    return _tokenizer().token_to_id("<|endoftext|>")
