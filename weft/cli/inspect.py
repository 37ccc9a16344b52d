"""``weft inspect``: the reuse of each request in the prefix cache, and the content of the cache afterwards."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from weft.cli.flags import engine_settings, sampling_params, sampling_settings
from weft.cli.generate import add_prompt_flags, job_prompt, read_jobs
from weft.cli.parser import add_verb
from weft.errors import ConfigError, RequestError
from weft.outputs import RequestOutput
from weft.sampling_params import SamplingParams

if TYPE_CHECKING:
    from weft.engine.llm import LLM
    from weft.engine.prompts import Prompt
    from weft.stats import CacheStats

MAX_TEXT = 90
"""Number of characters of a prompt that are shown, the last ones."""

_EPILOG = """\
examples:
  weft inspect --dump
  weft inspect --dump "A shared beginning, one" "A shared beginning, two" "A shared beginning, three"
  weft inspect --input questions.jsonl --eviction-policy lru --num-state-slots 20

Prompts run one after another. Without any, a small workload runs: a fan-out of questions over one
text, one of them again, and a second turn.

A line of the tree is a span of positions [start, end) with the pages that hold its KV, the positions at
which a recurrent state is kept, those at which one was evicted, and how many admissions of requests ago it
was last used."""

_TEXT = "A bakery sells rolls for 2 coins, loaves for 5 coins and cakes for 11 coins. "
_QUESTIONS = (
    "How much are 3 rolls and 2 loaves?",
    "What is left of 50 coins after a loaf and a cake?",
    "Name the dearest of them.",
)


def add_parser(verbs: Any, help: str) -> None:
    parser = add_verb(verbs, "inspect", run, help, arguments="[flags] [PROMPT ...]", epilog=_EPILOG)
    parser.add_argument("--dump", action="store_true", help="print the prefix tree afterwards")
    add_prompt_flags(parser, "JSON lines to run, as for weft generate; - is stdin")


def run(args: argparse.Namespace) -> int:
    jobs = read_jobs(args) if args.prompts or args.input else []
    for job in jobs:
        if job.error is not None:
            raise RequestError(f"line {job.number}: {job.error}", job.error.param)
    params = sampling_params({"max_tokens": 16, "temperature": 0} | sampling_settings(args))
    if not engine_settings(args).get("enable_prefix_caching", True):
        raise ConfigError("there is nothing to inspect with enable_prefix_caching=False; leave it out")
    from weft import LLM
    from weft.cache.dump import dump_tree

    with LLM(**engine_settings(args)) as llm:
        if jobs:
            for job in jobs:
                _show(llm, job_prompt(llm, job), job.params)
        else:
            _run_workload(llm, params)
        if args.dump:
            print(f"\n{dump_tree(llm._core.manager.tree)}")
        _print_totals(llm.stats())
    return 0


def _run_workload(llm: LLM, params: SamplingParams) -> None:
    """Run questions about one text, the first question again, and a continuation of its answer."""
    questions = [_TEXT + question for question in _QUESTIONS]
    first, *_ = [_show(llm, question, params) for question in questions]
    _show(llm, questions[0], params)
    history = first.prompt_token_ids + list(first.outputs[0].token_ids)
    assert llm.tokenizer is not None
    more = llm.tokenizer.encode(" And for twice as many?", add_special_tokens=False)
    _show(llm, {"prompt": "(the first answer continued)", "prompt_token_ids": history + more}, params)


def _show(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    """Run one request and print what it found."""
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    text = " ".join((output.prompt or "").split()) or f"{len(output.prompt_token_ids)} token ids"
    print(f"{output.request_id}: {text if len(text) <= MAX_TEXT else '… ' + text[-MAX_TEXT:]}")
    print(f"    {output.cache_report}")
    return output


def _print_totals(cache: CacheStats) -> None:
    print(
        f"\nreused {cache.num_hit_tokens:,} of {cache.num_query_tokens:,} tokens; "
        f"pages: {cache.num_free_pages:,} free, {cache.num_evictable_pages:,} kept, "
        f"{cache.num_evicted_pages:,} evicted so far; "
        f"states: {cache.num_free_slots:,} free, {cache.num_evictable_slots:,} kept, "
        f"{cache.num_evicted_states:,} evicted so far"
    )
