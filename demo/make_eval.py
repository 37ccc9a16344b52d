"""Make the evaluation: 200 problems as chats of five worked examples and a question.

Owns the choice of problems; they are drawn from the evaluation's part of the split and never trained on.
The file was made once, before training, and is frozen: a test only checks that this module still makes it.
Run: python -m demo.make_eval
"""

import json
from random import Random

from demo import problems, templates
from demo.problems import DEV, EVAL, TRAIN, Problem
from weft.assets import EVAL_PATH

EXAMPLES = 5
UNSEEN_PER_TEMPLATE = 2  # 30 held-out templates: 60 problems
SEEN, CHAINS, BARE, ONE = 140, 20, 20, 16  # the other 84 of the seen are word problems of two to four steps


def draw_from(split: str, template: templates.Template, rng: Random) -> Problem:
    """A problem of `template` that belongs to `split`; of a chain where the template has too few numbers for one."""
    problem, attempts = problems.draw(template, rng), 1
    while problem.split != split:
        problem = problems.draw(template if attempts < 5000 else problems.chain(rng), rng)
        attempts += 1
    return problem


def questions(split: str, rng: Random) -> list[tuple[Problem, bool]]:
    """The 200 questions, each with whether its template was held out of training."""
    many = templates.MANY_STEPS
    chosen = [*rng.sample(templates.BARE, BARE), *rng.sample(templates.ONE_STEP, ONE), *many]
    chosen += rng.sample(many, SEEN - CHAINS - len(chosen))
    chosen += [problems.chain(rng) for _ in range(CHAINS)]
    seen = [(draw_from(split, template, rng), False) for template in chosen]
    held_out = [t for t in templates.HELD_OUT for _ in range(UNSEEN_PER_TEMPLATE)]
    return seen + [(draw_from(split, template, rng), True) for template in held_out]


def chat(problem: Problem, rng: Random) -> list[dict[str, str]]:
    """Five worked examples of other templates, then the question."""
    pool = [t for t in [*templates.ONE_STEP, *templates.MANY_STEPS] if t.name != problem.template]
    messages = []
    for template in rng.sample(pool, EXAMPLES):
        example = draw_from(TRAIN, template, rng)
        messages += [
            {"role": "user", "content": example.question},
            {"role": "assistant", "content": example.reply},
        ]
    return [*messages, {"role": "user", "content": problem.question}]


def records(split: str = EVAL, seed: int = 2024) -> list[dict]:
    """The evaluation as it is written; `split` DEV gives a set of the same kind to watch training with."""
    rng = Random(f"{split}/{seed}")
    rows, known = [], set()
    for problem, unseen in questions(split, rng):
        while (problem.template, problem.numbers) in known:
            problem = draw_from(split, templates.TEMPLATES[problem.template], rng)
        known.add((problem.template, problem.numbers))
        rows.append(record(f"{split}-{len(rows):03d}", problem, unseen, rng))
    return rows


def record(name: str, problem: Problem, unseen: bool, rng: Random) -> dict:
    """One line of the evaluation."""
    return {
        "id": name,
        "template": problem.template,
        "unseen_template": unseen,
        "numbers": list(problem.numbers),
        "steps": problem.steps,
        "messages": chat(problem, rng),
        "answer": str(problem.answer),
    }


def dev_records(count: int = 64) -> list[dict]:
    """A development set of `count` problems of seen templates and two of each of DEV_HELD_OUT, not of HELD_OUT."""
    rng = Random("dev")
    seen = [row for row in records(DEV) if not row["unseen_template"]]
    rows = rng.sample(seen, count)
    for i, template in enumerate(templates.DEV_HELD_OUT * 2):
        problem = draw_from(DEV, template, rng)
        rows.append(record(f"dev-new-{i:02d}", problem, True, rng))
    return rows


if __name__ == "__main__":
    lines = [json.dumps(row, ensure_ascii=False) for row in records()]
    EVAL_PATH.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} problems in {EVAL_PATH.name}")
