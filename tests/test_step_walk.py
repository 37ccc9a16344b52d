"""The walk through one decode step, from ``LLM.generate`` to the sampled token, stays short.

The third decode step of one greedy request runs on the CPU under ``sys.setprofile``. What counts:

- A call counts where it enters another module of Weft. Helpers in the caller's own module are on the page that is open
  already. A function counts once, however often the step calls it.
- The scheduler, the cache, the model (``models/``, ``layers/``), operations (``ops/``) and a replayed graph are other
  walks. An entry into the scheduler or a graph counts. Nothing that these walks call counts.
- A return is a call that enters a module which the walk has left before.
- Left out: types and configuration, constructors, properties, comprehensions, lambdas and generators, and functions of
  one statement that call nothing of the above.

The walk ends when the executor has launched the step, whose results are then on their way to the host.

    python -m tests.test_step_walk      # prints the walk of each mode
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import weft
from tests.tiny import make_checkpoint
from weft import LLM, SamplingParams

PACKAGE = Path(weft.__file__).parent
OTHER_WALKS = ("cache/", "layers/", "models/", "ops/")
LEAVES = ("scheduler/scheduler.py", "graph/graph_set.py")
TYPES = ("messages.py", "request.py", "config/", "forward_context.py", "collector.py", "processes/")
MOST = {"FULL": (17, 14, 0), "NONE": (18, 13, 0)}
"""Most calls, modules and returns by graph mode."""
STEP, LAUNCH = "engine/core.py EngineCore.step", "executor/in_process.py InProcessExecutor.launch"


@dataclass
class Call:
    """One call of a function of Weft, and the calls that it made."""

    module: str
    name: str
    code: CodeType
    calls: list[Call] = field(default_factory=list)
    is_over: bool = False

    def __str__(self) -> str:
        return f"{self.module} {self.name}"

    def find(self, name: str) -> Iterator[Call]:
        for call in self.calls:
            if str(call) == name:
                yield call
            yield from call.find(name)


@functools.cache
def syntax(path: str) -> dict[int, ast.FunctionDef]:
    """Functions of a file by their first line, decorators included."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {min([f.lineno, *(d.lineno for d in f.decorator_list)]): f for f in functions}


def is_left_out(call: Call) -> bool:
    """Types, constructors, properties, comprehensions, lambdas, generators, and leaves of one statement."""
    code = call.code
    if call.module.startswith((*TYPES, *OTHER_WALKS)) or code.co_flags & inspect.CO_GENERATOR:
        return True
    if code.co_name.startswith("<") or (code.co_name.startswith("__") and code.co_name != "__call__"):
        return True
    function = syntax(code.co_filename)[code.co_firstlineno]
    if any(isinstance(d, ast.Name) and d.id == "property" for d in function.decorator_list):
        return True
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return len(body) == 1 and all(is_left_out(inner) for inner in call.calls)


def entries(call: Call) -> Iterator[tuple[Call, Call]]:
    """Each call into another module below ``call``, with the call that made it."""
    for inner in call.calls:
        if not is_left_out(inner):
            if inner.module != call.module:
                yield call, inner
            if not inner.module.startswith(LEAVES):
                yield from entries(inner)
        elif not inner.module.startswith(OTHER_WALKS):  # what a constructor or a comprehension calls, its caller calls
            yield from ((call, entered) for _, entered in entries(inner) if entered.module != call.module)


def decode_walk(mode: str, folder: Path) -> list[tuple[Call, Call]]:
    """The entries of the third decode step, ``LLM.generate`` first."""
    stack = [root := Call("", "test", decode_walk.__code__)]

    def notice(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or not path.is_relative_to(PACKAGE):
            return
        if event == "return":
            stack.pop()
            return
        call = Call(path.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname, frame.f_code)
        stack[-1].calls.append(call)
        stack.append(call)

    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(
        str(folder), device="cpu", skip_tokenizer_init=True, cuda_graph_mode=mode, max_num_seqs=4,
        max_num_batched_tokens=64, cpu_cache_gib=0.01, enable_overlap=False,
    ) as llm:  # fmt: skip
        sys.setprofile(notice)
        try:
            llm.generate([[1, 2, 3, 4]], greedy, use_tqdm=False)
        finally:
            sys.setprofile(None)
    (generate,) = (call for call in root.calls if call.name == "LLM.generate")
    step = list(generate.find(STEP))[3]
    launch = next(step.find(LAUNCH))
    before = takewhile(lambda entry: entry[1] is not launch, entries(step))
    return [(root, generate), (generate, step), *before, (step, launch), *entries(launch)]


@dataclass(frozen=True)
class Size:
    """The size of a walk: the entered functions, their modules, and the number of returns to a module."""

    calls: list[str]
    modules: list[str]
    returns: int

    @staticmethod
    def of(walk: list[tuple[Call, Call]]) -> Size:
        visits = [entered.module for _, entered in walk]
        returns = sum(visits[i] in visits[: i - 1] and visits[i] != visits[i - 1] for i in range(1, len(visits)))
        return Size(list(dict.fromkeys(str(entered) for _, entered in walk)), list(dict.fromkeys(visits)), returns)

    def __str__(self) -> str:
        head = f"{len(self.calls)} calls in {len(self.modules)} modules, {self.returns} returns"
        return "\n  ".join([head, *self.calls])


@pytest.mark.parametrize("mode", MOST)
def test_from_generate_to_a_sampled_token(mode: str, tmp_path: Path) -> None:
    size = Size.of(decode_walk(mode, make_checkpoint("Qwen3ForCausalLM", tmp_path)))
    assert {STEP, "runner/sampling/step_sampler.py StepSampler.sample"} <= set(size.calls)
    max_calls, max_modules, max_returns = MOST[mode]
    assert len(size.calls) <= max_calls and len(size.modules) <= max_modules and size.returns <= max_returns, size


if __name__ == "__main__":
    for mode in MOST:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{mode}: {Size.of(decode_walk(mode, make_checkpoint('Qwen3ForCausalLM', Path(folder))))}")
