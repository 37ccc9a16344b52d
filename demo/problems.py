"""From a template to a problem: names and numbers drawn, question rendered, solution worked out.

Owns the drawing of problems and the split. A hash of (template, numbers) says whether a problem
may be trained on. No list of forbidden problems is needed, and none can be forgotten.
Knows nothing of tokens or of how problems are strung into chats.
"""

import hashlib
import re
from random import Random
from typing import NamedTuple

from demo import arithmetic, frames, rewording, stories, tales, templates, words
from demo.templates import Template

CHOICE = re.compile(r"\[([^\[\]]*)\]")  # the innermost; they may be nested
SLOT = re.compile(r"\{(\w+)\}")
SPLITS = 24  # one part in 24 is kept for development problems, another for the evaluation
SHORT_RANGES = [(11, 99), (3, 40), (2, 20), (2, 99)]
WIDE_RANGES = [(2, 20), (11, 99), (11, 480), (11, 480), (100, 900)]
OLD, TALES = 0.25, 0.3  # shares of the stories; the others are frames
IDLE = 0.1  # share of the stories with a sentence that says nothing
EVAL, DEV, TRAIN = "eval", "dev", "train"


class Problem(NamedTuple):
    """A question with its worked answer; (template, numbers) identifies it. Idle numbers are not among them."""

    template: str
    numbers: tuple[int, ...]
    question: str
    reply: str
    answer: int
    steps: int

    @property
    def split(self) -> str:
        """The part of the data that has this problem, derived from its identity alone."""
        key = f"{self.template}|{','.join(map(str, self.numbers))}"
        part = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest()) % SPLITS
        return {0: EVAL, 1: DEV}.get(part, TRAIN)


def draw(template: Template, rng: Random, distract: float = 0.15, wide: bool = False) -> Problem:
    """One problem from `template`: numbers redrawn until every step of the solution is allowed.

    `wide` draws from the wide vocabulary and from wide ranges, as the stories need.
    """
    text = template.text
    while "[" in text:
        text = CHOICE.sub(lambda m: rng.choice(m[1].split("|")), text)
    slots = SLOT.findall(text)
    letters = [s for s in dict.fromkeys(slots) if s in templates.RANGES]
    numbers, worked = _numbers(template.steps, letters, rng, wide)
    if template.name[:4] != "bare" and rng.random() < distract:
        text = _with_one_of(templates.WIDE_DISTRACTORS if wide else templates.DISTRACTORS, text, rng)
        numbers["z"] = _number("z", rng)
    elif wide and rng.random() < IDLE:
        text = _with_one_of(templates.IDLE, text, rng)
    filling = (words.draw(rng) if wide else _words(rng)) | numbers
    question = SLOT.sub(lambda m: str(filling[m[1]]), text)
    if wide:
        question = _tidy(rewording.reworded(question, rng))
    identity = tuple(numbers[s] for s in letters)  # an idle number makes no other problem
    lines, answer = worked
    return Problem(template.name, identity, question, "\n".join([*lines, f"Answer: {answer}"]), answer, len(lines))


def story(rng: Random) -> Problem:
    """A problem with free wording."""
    kind = rng.random()
    template = stories.draw(rng) if kind < OLD else tales.draw(rng) if kind < OLD + TALES else frames.draw(rng)
    return draw(template, rng, wide=True)


def _numbers(steps: str, letters: list[str], rng: Random, wide: bool) -> tuple[dict[str, int], tuple[list[str], int]]:
    """Numbers for the letters and the worked solution; wide ranges change now and then, as some never fit."""
    ranges, attempt, worked = dict(templates.RANGES), 0, None
    while worked is None:
        if wide and attempt % 50 == 0:
            ranges |= {s: rng.choice(WIDE_RANGES) for s in "abcdef"}
            ranges |= {s: rng.choice(SHORT_RANGES) for s in "pqrvstuw"} if rng.random() < 0.5 else {}
        numbers = {s: rng.randint(*ranges[s]) for s in letters}
        worked = solve(steps, numbers)
        attempt += 1
    return numbers, worked


def _tidy(text: str) -> str:
    """Sentences begin with a capital letter and blanks stand alone, however a story was put together."""
    text = re.sub(r" +([.,?]?)", lambda m: m[1] or " ", text).strip()
    text = re.sub(r"\b([Aa])n? (?=([aeio]|hour)?)", lambda m: f"{m[1]}{'n' * bool(m[2])} ", text)
    return re.sub(r"(^|[.?!] )([a-z])", lambda m: m[1] + m[2].upper(), text)


def solve(steps: str, numbers: dict[str, int]) -> tuple[list[str], int] | None:
    """The written lines and the answer, or None where a step leaves the allowed ranges."""
    lines, results = [], []
    for step in steps.split("; "):
        match = re.fullmatch(r"(#?\d*|\w)([-+*/])(#?\d*|\w)", step)
        a, b = (_operand(term, numbers, results) for term in (match[1], match[3]))
        if not arithmetic.allowed(match[2], a, b):
            return None
        lines.append(arithmetic.write(match[2], a, b))
        results.append(arithmetic.result(match[2], a, b))
    return lines, results[-1]


def chain(rng: Random) -> Template:
    """A template put together from a start, two or three events and a closing question."""
    events = [rng.randrange(len(templates.CHAIN_EVENTS)) for _ in range(rng.choice((2, 2, 3)))]
    start, end = rng.randrange(len(templates.CHAIN_STARTS)), rng.randrange(len(templates.CHAIN_ENDS))
    sentences, steps, left = [templates.CHAIN_STARTS[start]], [], "a"
    for letter, event in zip("bcd", events, strict=False):
        sentence, op = templates.CHAIN_EVENTS[event]
        term = "m" if op == "*" else letter
        sentences.append(sentence.replace("{v}", "{" + letter + "}"))
        steps.append(f"{left}{op}{term}")
        left = "#"
    name = "chain-" + "-".join(map(str, [start, *events, end]))
    return Template(name, " ".join([*sentences, templates.CHAIN_ENDS[end]]), "; ".join(steps))


def _number(letter: str, rng: Random) -> int:
    low, high = templates.RANGES[letter]
    return rng.randint(low, high)


def _operand(term: str, numbers: dict[str, int], results: list[int]) -> int:
    if term.startswith("#"):
        return results[int(term[1:] or 0) - 1]
    return numbers[term]


def _words(rng: Random) -> dict[str, str]:
    (name, he), (other, _) = rng.sample(templates.NAMES, 2)
    _, him, his = (he, *templates.PRONOUNS[he][1:])
    x, y = rng.sample(templates.THINGS, 2)
    filling = {"N": name, "M": other, "x": x, "y": y, "he": he, "him": him, "his": his}
    return filling | {"He": he.capitalize(), "His": his.capitalize()}


def _with_one_of(idle: list[str], text: str, rng: Random) -> str:
    """The text with an idle sentence before the closing question or after the first sentence."""
    sentences = re.split(r"(?<=\.) ", text)
    sentences.insert(rng.randint(min(1, len(sentences) - 1), len(sentences) - 1), rng.choice(idle))
    return " ".join(sentences)
