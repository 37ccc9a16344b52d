"""The LM evaluation harness with a task of our own: log probabilities of given answers (echo) and generated ones.

Runs in an environment of its own: make test-clients.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.clients.conftest import MODEL
from tests.server.running import ROOT, RunningServer

pytest.importorskip("lm_eval", reason="lm-eval is not installed; make test-clients has it")
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from weft import LLM, SamplingParams

TOKENIZER = ROOT / "weft" / "assets" / "weft-mini"
NUM_DOCUMENTS = 12
QUESTION = "<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n"

COMMON = """\
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
"""
CHOOSE = """\
task: weft_choose
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
WRITE = """\
task: weft_write
output_type: generate_until
doc_to_target: "{{total}}"
generation_kwargs:
  until: ["<|im_end|>"]
  max_gen_toks: 60
filter_list:
  - name: last-number
    filter:
      - {function: regex, regex_pattern: "(\\\\d+)\\\\D*$"}
      - {function: take_first}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder = tmp_path_factory.mktemp("tasks")
    rng = random.Random(5)
    file = folder / "sums.jsonl"
    file.write_text("".join(json.dumps(document(rng)) + "\n" for _ in range(NUM_DOCUMENTS)))
    for name, text in (("choose", CHOOSE), ("write", WRITE)):
        (folder / f"{name}.yaml").write_text(COMMON.format(file=file) + text)
    return TaskManager(include_path=str(folder), include_defaults=False)


def document(rng: random.Random) -> dict[str, Any]:
    """A sum of two digits, and three answers, one of them right."""
    a, b, answer = rng.randint(2, 9), rng.randint(2, 9), rng.randrange(3)
    choices = [f"{a} + {b} = {a + b + i - answer}" for i in range(3)]
    return {"question": QUESTION.format(a=a, b=b), "choices": choices, "answer": answer, "total": str(a + b)}


def evaluate(server: RunningServer, tasks: TaskManager, task: str, **fields: Any) -> dict[str, Any]:
    fields = {"model": MODEL, "base_url": f"{server.url}/v1/completions", "max_retries": 1} | fields
    results = simple_evaluate("local-completions", model_args=fields, tasks=[task], task_manager=tasks)
    assert results is not None
    return results


BACKENDS: list[dict[str, Any]] = [
    {"tokenizer_backend": "huggingface", "tokenizer": str(TOKENIZER), "num_concurrent": 4},
    {"tokenizer_backend": "auto"},  # asks the server for everything
]


@pytest.mark.parametrize("backend", BACKENDS, ids=["local", "remote"])
def test_given_answers(mini: RunningServer, tasks: TaskManager, backend: dict[str, Any]) -> None:
    results = evaluate(mini, tasks, "weft_choose", **backend)
    assert results["results"]["weft_choose"]["acc,none"] >= 0.9
    sample = results["samples"]["weft_choose"][0]
    told = [response[0] for response in sample["filtered_resps"]]
    assert told == pytest.approx([logprob(*pair) for pair in sample["arguments"]], abs=1e-3)


def logprob(context: str, answer: str) -> float:
    """Log probability of the answer after the context, from the engine itself. The harness counts white space at the
    end of the context to the answer."""
    llm = LLM(device="cpu", cpu_cache_gib=0.05)
    try:
        first = len(llm.tokenizer.encode(context.rstrip()))
        output = llm.generate(context + answer, SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    finally:
        llm.shutdown()
    entries = (output.prompt_logprobs or [])[first:]
    return sum(next(iter(entry.values())).logprob for entry in entries if entry is not None)


@pytest.mark.parametrize("backend", BACKENDS, ids=["local", "remote"])
def test_written_answers(mini: RunningServer, tasks: TaskManager, backend: dict[str, Any]) -> None:
    results = evaluate(mini, tasks, "weft_write", **backend)
    assert results["results"]["weft_write"]["exact_match,last-number"] >= 0.9
