"""``weft eval``: the accuracy of a model on the bundled word problems."""

import argparse
import time
from typing import Any

from weft.bench import evaluation, report
from weft.cli.flags import add_engine_flags, engine_settings
from weft.cli.parser import add_verb, check_lowest


def add_parser(verbs: Any, help: str) -> None:
    parser = add_verb(verbs, "eval", run, help)
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N problems")
    parser.add_argument("--dump", action="store_true", help="print every question and reply")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    check_lowest(args, limit=1)
    json_path = report.open_json(args.json)
    problems = evaluation.read_problems(limit=args.limit)
    from weft import LLM

    given = engine_settings(args)
    num_seqs = min(evaluation.MAX_NUM_SEQS, given.get("max_num_batched_tokens", evaluation.MAX_NUM_SEQS))
    with LLM(**({"max_num_seqs": num_seqs} | given)) as llm:
        start = time.perf_counter()
        verdicts = evaluation.ask(llm, problems)
        seconds = time.perf_counter() - start
        head = report.provenance(llm.config.device) | {"config": report.settings(llm.config)}
    figures = evaluation.score(verdicts)
    if args.dump:
        for verdict in verdicts:
            _print_verdict(verdict)
    _print_figures(figures, seconds)
    report.write_json(json_path, figures | {"seconds": round(seconds, 2)} | head | {"replies": _replies(verdicts)})
    return 0


def _replies(verdicts: list[evaluation.Verdict]) -> list[dict[str, Any]]:
    return [
        {"id": v.problem.id, "right": v.right, "reply": v.reply, "finish_reason": v.finish_reason} for v in verdicts
    ]


def _print_verdict(verdict: evaluation.Verdict) -> None:
    problem = verdict.problem
    mark = "right" if verdict.right else f"WRONG, the answer is {problem.answer}"
    print(f"--- {problem.id} ({problem.template}): {mark}\n> {problem.messages[-1]['content']}\n{verdict.reply}\n")


def _print_figures(figures: dict[str, Any], seconds: float) -> None:
    print(f"accuracy {figures['accuracy']:.3f} ({figures['num_right']} of {figures['num_problems']}, {seconds:.1f} s)")
    for name in ("seen_templates", "unseen_templates"):
        if figures[name] is not None:
            print(f"  {name.replace('_', ' ')}: {figures[name]:.3f}")
    misses = [f"{name} {share:.2f}" for name, share in figures["by_template"].items() if share < 1]
    print("  templates with misses: " + (", ".join(misses) or "none"))
