"""``weft generate``: complete prompts given as arguments, on stdin, or as a file of JSON lines.

Job: submit jobs to the engine, write results in input order as soon as they are available. Owns: the verb's output.
Does not know: how lines are read (``jobs.py``), or how tokens are generated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from weft.cli.flags import add_engine_flags, add_sampling_flags, engine_settings, sampling_settings
from weft.cli.jobs import Job, jobs_from_lines, jobs_from_texts, output_line
from weft.cli.meter import Meter
from weft.cli.parser import add_verb
from weft.config.fields import OPTIONS
from weft.errors import ConfigError, RequestError
from weft.outputs import RequestOutput

if TYPE_CHECKING:
    from weft.engine.llm import LLM

Result = RequestOutput | RequestError

_EPILOG = """\
examples:
  weft generate --chat "What is 12 + 30?"
  echo "Once upon a time" | weft generate - --max-tokens 50
  weft generate --input questions.jsonl --output answers.jsonl

An input line is an object with prompt, prompt_token_ids or messages, and any sampling parameter."""


def add_parser(verbs: Any, help: str) -> None:
    parser = add_verb(verbs, "generate", run, help, arguments="[flags] [PROMPT ...]", epilog=_EPILOG)
    parser.add_argument("--output", metavar="FILE", help="write JSON lines there; - is stdout")
    parser.add_argument("--quiet", action="store_true", help="no progress and no figures on stderr")
    add_prompt_flags(parser, "JSON lines to complete; - is stdin")


def add_prompt_flags(parser: argparse.ArgumentParser, input_help: str) -> None:
    """Add the arguments that ``read_jobs`` reads, and the flags of sampling and of the engine."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a text; - reads one from stdin")
    parser.add_argument("--chat", action="store_true", help="prompts are a user's messages: use the chat template")
    parser.add_argument("--input", metavar="FILE", help=input_help)
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    jobs = read_jobs(args)
    with _open_output(args) as output:
        from tqdm import tqdm

        from weft import LLM

        start = time.perf_counter()
        with LLM(**engine_settings(args)) as llm:
            meter = Meter()
            ready = meter.start - start
            write = _json_writer(output) if output else _text_writer(len(jobs))
            show_bar = output is not None and not args.quiet and sys.stderr.isatty()
            with tqdm(total=len(jobs), unit="line", disable=not show_bar) as bar:
                failed = _complete(llm, jobs, write, meter, bar.update)
    if not args.quiet:
        print(f"ready after {ready:.2f} s; {meter.summary()}", file=sys.stderr)
    return 1 if failed else 0


def read_jobs(args: argparse.Namespace) -> list[Job]:
    """Jobs from the verb's arguments ``prompts``, ``--input`` and ``--chat``."""
    settings = sampling_settings(args)
    _check_logprobs(settings, engine_settings(args).get("max_logprobs", OPTIONS["max_logprobs"].default))
    if args.input and args.prompts:
        raise ConfigError("give prompts as arguments or with --input, not both")
    if args.input:
        return list(jobs_from_lines(_read_lines(args.input), settings, chat=args.chat))
    if not args.prompts:
        raise ConfigError("no prompt: give one as an argument, - to read it from stdin, or --input FILE")
    texts = [sys.stdin.read() if text == "-" else text for text in args.prompts]
    return jobs_from_texts(texts, settings, chat=args.chat)


def _check_logprobs(sampling: dict[str, Any], limit: int) -> None:
    """Raises ConfigError before any weight is loaded if a flag asks for more log probabilities than are allowed."""
    for name in ("logprobs", "prompt_logprobs"):
        if limit != -1 and sampling.get(name, 0) > limit:
            flag = f"--{name.replace('_', '-')} {sampling[name]}"
            raise ConfigError(f"{flag}: at most {limit} per token are allowed; ask for fewer, or raise --max-logprobs")


def _read_lines(name: str) -> list[str]:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--input {name}: cannot be read: {error}") from error
    return text.split("\n")


@contextlib.contextmanager
def _open_output(args: argparse.Namespace) -> Iterator[IO[str] | None]:
    """Open the file of JSON lines before the engine starts; None: plain text on stdout."""
    if args.output is None and not args.input:
        yield None
    elif args.output in (None, "-"):
        yield sys.stdout
    else:
        try:
            file = Path(args.output).open("w", encoding="utf-8")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise ConfigError(f"--output {args.output}: cannot be written: {error}") from error
        with file:
            yield file


def _complete(llm: LLM, jobs: list[Job], write: Writer, meter: Meter, advance: Callable[[int], Any]) -> int:
    """Run all jobs together. Each result is written after the results before it. Returns the number of failed jobs."""
    running, results = _submit(llm, jobs)
    next_index = failed = 0
    while True:
        while next_index < len(jobs) and next_index in results:
            failed += _report(jobs[next_index], results[next_index], write)
            next_index += 1
        if next_index == len(jobs):
            return failed
        outputs = llm.step()
        meter.take(outputs)
        advance(sum(output.finished for output in outputs))
        for output in outputs:
            index = running[output.request_id]
            if output.finished:
                results[index] = _result(output)
            elif index == next_index:
                write(jobs[index], output)


def _submit(llm: LLM, jobs: list[Job]) -> tuple[dict[str, int], dict[int, Result]]:
    """Queue every job. Returns job index by request id, and the errors of refused jobs."""
    running: dict[str, int] = {}
    refused: dict[int, Result] = {}
    for index, job in enumerate(jobs):
        try:
            if job.error is not None:
                raise job.error
            running[llm.add_request(job_prompt(llm, job), job.params, priority=job.priority)] = index
        except RequestError as error:
            refused[index] = error
    return running, refused


def job_prompt(llm: LLM, job: Job) -> Any:
    if job.messages is None:
        return job.prompt
    return llm.render_chat(job.messages, job.tools, job.chat_template_kwargs)


def _result(output: RequestOutput) -> Result:
    for completion in output.outputs:
        if completion.finish_reason == "error":
            nan = "the model computed NaN for this prompt; its weights or this dtype are at fault"
            return RequestError(str(completion.stop_reason or nan))
    return output


def _report(job: Job, result: Result, write: Writer) -> bool:
    """Write a job's final result. Returns True if it failed."""
    write(job, result)
    if isinstance(result, RequestError):
        print(f"weft generate: line {job.number}: {result}", file=sys.stderr)
        return True
    return False


Writer = Callable[[Job, Result], None]
"""Accepts snapshots of the current job; the last one is finished."""


def _json_writer(file: IO[str]) -> Writer:
    def write(job: Job, result: Result) -> None:
        if isinstance(result, RequestError) or result.finished:
            line = json.dumps(output_line(job, result), ensure_ascii=False)
            # Invalid Unicode, such as half a surrogate pair of an id, is written as JSON's own escape.
            file.write(line.encode("utf-8", "backslashreplace").decode() + "\n")
            file.flush()

    return write


def _text_writer(num_jobs: int) -> Writer:
    """Write text to stdout. A single completion streams; several begin with their prompt."""
    written = 0

    def write(job: Job, result: Result) -> None:
        nonlocal written
        if isinstance(result, RequestError):
            return
        single = len(result.outputs) == 1
        if result.finished and not (num_jobs == 1 and single):
            _print_block(job, result)
        elif num_jobs == 1 and single:
            text = result.outputs[0].text
            print(text[written:], end="\n" if result.finished else "", flush=True)
            written = len(text)

    return write


def _print_block(job: Job, result: RequestOutput) -> None:
    asked = job.messages[-1].get("content") if job.messages else job.prompt
    print(f"> {asked}")
    for completion in result.outputs:
        print(completion.text or " ".join(map(str, completion.token_ids)))
    generated = sum(len(c.token_ids) for c in result.outputs)
    print(
        f"  ({len(result.prompt_token_ids)} prompt tokens, {result.num_cached_tokens} of them cached; "
        f"{generated} generated; {result.outputs[0].finish_reason})\n",
        flush=True,
    )
