"""Workloads for the prefix cache: sequences of prompts, most of which continue an earlier prompt."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MAX_TOKEN_ID = 10_000


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. Its prompt is a part of an earlier one, followed by ``new``.

    Attributes:
        new: token ids that no earlier request had.
        output_len: tokens to generate.
        parent: index of the earlier turn, or None.
        cut: use only this many leading tokens of the parent's prompt and output; None: all.
        drop: leave out this many leading tokens of the parent's output (reasoning that a template drops).
        marks_boundary: the end of the prompt is known as a turn boundary, where the next one may diverge.
    """

    new: list[int]
    output_len: int
    parent: int | None = None
    cut: int | None = None
    drop: int = 0
    marks_boundary: bool = False

    def prompt(self, prompts: list[list[int]], outputs: list[list[int]]) -> list[int]:
        """The prompt, given the prompts and outputs of all earlier turns."""
        if self.parent is None:
            return list(self.new)
        history = prompts[self.parent] + outputs[self.parent][self.drop :]
        return history[: self.cut] + self.new


@dataclass(slots=True)
class _Builder:
    """Collects turns; ``seed`` decides every random number. Half-open token range ``[0, vocab_size)``."""

    rng: random.Random
    vocab_size: int
    turns: list[Turn] = field(default_factory=list)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocab_size) for _ in range(count)]

    def add(self, turn: Turn) -> int:
        self.turns.append(turn)
        return len(self.turns) - 1


def chat(
    b: _Builder, conversations: int = 16, turns: int = 8, user: int = 210, output: int = 64, drop: int = 0
) -> None:
    """Conversations in turn: each appends user tokens to everything so far."""
    last: dict[int, int] = {}
    for _ in range(turns):
        for c in range(conversations):
            last[c] = b.add(Turn(b.tokens(user), output, last.get(c), drop=drop, marks_boundary=drop > 0))


def chat_stripped(b: _Builder) -> None:
    """Conversations as in ``chat``, but three quarters of every answer are reasoning that the next prompt leaves
    out."""
    chat(b, drop=48)


def fan_out(b: _Builder, requests: int = 64, shared: int = 1500, unique: int = 700, output: int = 16) -> None:
    """One system prompt, many questions."""
    system = b.tokens(shared)
    for _ in range(requests):
        b.add(Turn(system + b.tokens(unique), output))


def agent(b: _Builder, agents: int = 8, steps: int = 12, output: int = 100) -> None:
    """Growing contexts: a shared tools block, then tool results of very different sizes."""
    tools = b.tokens(1200)
    last: dict[int, int] = {}
    for step in range(steps):
        for a in range(agents):
            new = b.tokens(b.rng.choice([60, 250, 400, 1500]))
            last[a] = b.add(Turn(new if step else tools + new, output, last.get(a)))


def branching(b: _Builder, requests: int = 128) -> None:
    """A tree: every request cuts a random earlier one at a random position and continues from there."""
    lengths: list[int] = []
    for i in range(requests):
        parent = b.rng.randrange(i) if i and b.rng.random() < 0.85 else None
        cut = b.rng.randint(1, lengths[parent]) if parent is not None else None
        new = b.tokens(b.rng.choice([10, 100, 600]))
        b.add(Turn(new, 32, parent, cut))
        lengths.append((cut or 0) + len(new) + 32)


def mixed(b: _Builder) -> None:
    """Chat, fan-out and agent traces interleaved with one-off prompts of 16 to 8,192 tokens."""
    parts: list[list[Turn]] = []
    for make in (chat, fan_out, agent):
        part = _Builder(b.rng, b.vocab_size)
        make(part)
        parts.append(part.turns)
    parts.append([Turn(b.tokens(int(16 * 512 ** b.rng.random())), 16) for _ in range(120)])
    order = [p for p, turns in enumerate(parts) for _ in turns]
    b.rng.shuffle(order)
    places: list[list[int]] = [[] for _ in parts]
    for p in order:
        turn = parts[p][len(places[p])]
        parent = None if turn.parent is None else places[p][turn.parent]
        places[p].append(b.add(Turn(turn.new, turn.output_len, parent, turn.cut, turn.drop, turn.marks_boundary)))


WORKLOADS: Mapping[str, Callable[[_Builder], None]] = {
    "chat": chat,
    "chat-stripped": chat_stripped,
    "fan-out": fan_out,
    "agent": agent,
    "branching": branching,
    "mixed": mixed,
}


def make_workload(name: str, vocab_size: int, seed: int = 0) -> list[Turn]:
    """The turns of a workload, in order of arrival. Token ids are below ``min(vocab_size, MAX_TOKEN_ID)``."""
    builder = _Builder(random.Random(seed), min(vocab_size, MAX_TOKEN_ID))
    WORKLOADS[name](builder)
    return builder.turns
