"""The accuracy of a chat model on the bundled word problems.

Every problem is asked as a chat, and the answer is read from the reply.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.assets import EVAL_PATH, extract_answer
from weft.sampling_params import SamplingParams

if TYPE_CHECKING:
    from weft.engine.llm import LLM

MAX_NUM_SEQS = 128
"""Number of chats that run at a time, unless the user names another number."""

MAX_TOKENS = 320
"""Upper bound on tokens of a reply. Worked answers of the evaluation set are well below."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: worked examples and a question as a chat, the right answer, and its source."""

    id: str
    template: str
    unseen_template: bool
    messages: list[dict[str, str]]
    answer: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A model's reply to a problem. ``answer`` is None if the reply has none."""

    problem: Problem
    reply: str
    answer: str | None
    finish_reason: str | None

    @property
    def right(self) -> bool:
        return self.answer == self.problem.answer


def read_problems(path: Path = EVAL_PATH, limit: int | None = None) -> list[Problem]:
    """Read the problems of the evaluation set, or the first ``limit`` of them."""
    names = Problem.__dataclass_fields__
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:limit]]
    return [Problem(**{name: entry[name] for name in names}) for entry in entries]


def ask(llm: LLM, problems: Sequence[Problem], use_tqdm: bool = True) -> list[Verdict]:
    """Ask all problems. Returns greedy replies, in order."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    outputs = llm.chat([p.messages for p in problems], params, use_tqdm=use_tqdm)
    replies = [o.outputs[0] for o in outputs]
    return [Verdict(p, r.text, extract_answer(r.text), r.finish_reason) for p, r in zip(problems, replies, strict=True)]


def score(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Shares of right answers: ``accuracy`` (all), ``by_template``, ``seen_templates``, ``unseen_templates``.

    A group without problems is None.
    """
    by_template: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        by_template[verdict.problem.template].append(verdict)
    return {
        "accuracy": _share(verdicts),
        "num_problems": len(verdicts),
        "num_right": sum(v.right for v in verdicts),
        "seen_templates": _share([v for v in verdicts if not v.problem.unseen_template]),
        "unseen_templates": _share([v for v in verdicts if v.problem.unseen_template]),
        "by_template": {name: _share(group) for name, group in sorted(by_template.items())},
    }


def _share(verdicts: Sequence[Verdict]) -> float | None:
    return round(sum(v.right for v in verdicts) / len(verdicts), 4) if verdicts else None
