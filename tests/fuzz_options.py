"""Random traffic with every option of sampling and stopping, at every kind of layer: ``make fuzz-options``.

Job: engines and traffic as in ``tests/fuzz_engine.py``. Each answer is compared with the answer of an engine that runs
one request at a time, without cache, drafts, graphs and overlap. Compared are tokens, text, end and log probabilities.
Owns: the models, the options. Does not know: what a right token is (``tests/fuzz_engine.py`` does).

    python -m tests.fuzz_options [--seconds 110] [--first 0] [--count N]

A failure says its seed; ``--first SEED --count 1`` repeats it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any, cast

import torch

from tests import fuzz_engine
from tests.drafters import FromOutputs, install
from tests.fuzz_engine import CHOICES, TOLERANCE
from tests.speculation.conftest import Outputs, make_repeating_checkpoint
from tests.tiny import make_checkpoint
from tests.tiny_tokenizer import VOCAB_SIZE
from weft import LLM, CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams
from weft.engine.input_processor import _sample_seed
from weft.outputs import LogprobsDict

LONGEST = 160
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 20}
MODELS: dict[str, Callable[[Path], Path]] = {
    "head": partial(make_repeating_checkpoint, "Qwen3NextForCausalLM", head=True),
    "windows": partial(make_repeating_checkpoint, "Qwen3ForCausalLM", **WINDOWS),
    "pieces of words": partial(make_checkpoint, "Qwen3NextForCausalLM", with_tokenizer="sentencepiece"),
} | {
    arch: partial(make_repeating_checkpoint, arch)
    for arch in (
        "Gemma3ForCausalLM", "KimiLinearForCausalLM", "Lfm2ForCausalLM", "BambaForCausalLM", "MiniMaxForCausalLM",
        "JambaForCausalLM", "BailingHybridForCausalLM", "Lfm3ForCausalLM", "RecurrentGemmaForCausalLM",
        "InklingForCausalLM", "Inkling2ForCausalLM",
    )
}  # fmt: skip
"""Most repeat themselves, so that drafts from the text are often right."""


class Plain:
    """The engine to compare with; one model's, made when it is first asked for."""

    def __init__(self, name: str, folder: Path) -> None:
        self.has_head, self._name, self._folder = name == "head", name, folder
        self._llm: LLM | None = None

    @property
    def folder(self) -> Path:
        if not self._folder.exists():
            MODELS[self._name](self._folder)
        return self._folder

    def answer(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        if self._llm is None:
            settings: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False, "cuda_graph_mode": "NONE"}
            self._llm = LLM(str(self.folder), max_model_len=LONGEST, dtype="float32", cpu_cache_gib=0.01, **settings)
        return self._llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]


def favour(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor."""
    logits[(7 * len(output)) % len(logits)] += 3.0
    return logits


@dataclass
class Episode(fuzz_engine.Episode):
    """``expected``: by request; ``drafts``: what is drafted by some engines, nearly right."""

    expected: dict[str, RequestOutput] = field(default_factory=dict)
    drafts: Outputs = field(default_factory=dict)

    @property
    def _plain(self) -> Plain:
        return cast(Plain, self.reference)

    def _install_drafter(self) -> None:
        if self.rng.random() < 0.6:
            wrong = self.rng.choice([0.0, 0.1, 0.4])
            self.method = "mostly right"
            install(self.llm, FromOutputs(self.drafts, lambda place, rng: rng.random() < wrong, self.rng))

    # -- options -----------------------------------------------------------------------------------------------------

    def _params(self, tokens: list[int]) -> SamplingParams:
        values = self._values(self.context - len(tokens))
        free = self._plain.answer(tokens, SamplingParams(**values))
        if "structured_outputs" not in values:
            values |= self._ends(values["max_tokens"], self.rng.choice(free.outputs))
        params = SamplingParams(**values)
        self.expected[f"r{len(self.sent)}"] = self._plain.answer(tokens, params)
        for i, completion in enumerate(free.outputs):
            self.drafts[tuple(tokens), _sample_seed(values["seed"], i)] = list(completion.token_ids)
        return params

    def _values(self, room: int) -> dict[str, Any]:
        """Everything but what ends the text."""
        rng = self.rng
        values: dict[str, Any] = {
            "max_tokens": rng.choice([1, room, room, rng.randint(1, room)]),
            "ignore_eos": rng.random() < 0.7,
            "temperature": rng.choice([0.0, 0.0, 0.7, 1.3]),
            "seed": rng.randrange(2**32),
            "n": rng.choice([1, 1, 1, 2, 3]),
            "skip_special_tokens": rng.random() < 0.9,
        }
        sometimes = {
            "top_k": [1, 5, 40], "top_p": [0.3, 0.9, 0.99], "min_p": [0.05, 0.3], "logprobs": [0, 3],
            "prompt_logprobs": [0, 2],
        }  # fmt: skip
        values |= {name: rng.choice(choices) for name, choices in sometimes.items() if rng.random() < 0.25}
        edit = rng.random()
        if edit < 0.08:
            form = {"choice": CHOICES} if rng.random() < 0.5 else {"regex": "(a|b|the|[0-9 ]){1,20}"}
            values |= {"ignore_eos": False, "structured_outputs": StructuredOutputsParams(**form)}
        elif edit < 0.16:
            values |= {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": -0.3}
        elif edit < 0.2:
            values["allowed_token_ids"] = rng.sample(range(VOCAB_SIZE), 20)
        elif edit < 0.24:
            values["logits_processors"] = [favour]
        elif edit < 0.28:
            values["logit_bias"] = {rng.randrange(VOCAB_SIZE): rng.choice([-5.0, 3.0])}
        return values

    def _ends(self, max_tokens: int, free: CompletionOutput) -> dict[str, Any]:
        """Draw options that end a text, or forbid an end, from ``free``, the answer without these options."""
        rng, text, values = self.rng, free.text, dict[str, Any]()
        if text and rng.random() < 0.4:
            begins = [rng.randrange(len(text)) for _ in range(rng.randint(1, 3))]
            values["stop"] = [text[at : at + rng.randint(1, 6)] for at in begins]
            values["include_stop_str_in_output"] = rng.random() < 0.4
        if free.token_ids and rng.random() < 0.3:
            values["stop_token_ids"] = [rng.choice(free.token_ids)]
        if rng.random() < 0.2:
            values["min_tokens"] = rng.randint(0, max_tokens)
        words = [word[:8] for word in text.split() if "\ufffd" not in word]
        if words and rng.random() < 0.1:
            values["bad_words"] = [rng.choice(words)]
        return values

    # -- what came of it ---------------------------------------------------------------------------------------------

    def _ended(self, output: RequestOutput) -> None:
        sent, expected = self.sent[output.request_id], self.expected[output.request_id]
        self.num_cached += output.num_cached_tokens or 0
        for found, wanted in zip(output.outputs, expected.outputs, strict=True):
            where = f"{output.request_id} {sent}\n  found    {found}\n  expected {wanted}"
            self.num_tokens += len(found.token_ids)
            self.corpus.append(sent.prompt + list(found.token_ids))
            if sent.aborted and found.finish_reason == "abort":
                assert found.token_ids == wanted.token_ids[: len(found.token_ids)], where
                continue
            ends = [(each.token_ids, each.text, each.finish_reason, each.stop_reason) for each in (found, wanted)]
            assert ends[0] == ends[1], where
            assert _alike(found.logprobs, wanted.logprobs), where
        assert sent.aborted or _alike(output.prompt_logprobs, expected.prompt_logprobs), f"{output.request_id} {sent}"
        self.corpus = self.corpus[-12:]


def _alike(found: list[Any] | None, wanted: list[Any] | None) -> bool:
    """The same log probabilities, which may be minus infinity. Where several tokens are alike, others of them may be
    listed."""
    if found is None or wanted is None:
        return found is wanted
    pairs: list[tuple[LogprobsDict | None, LogprobsDict | None]] = list(zip(found, wanted, strict=True))
    return all(
        f is w if f is None or w is None else
        next(iter(f)) == next(iter(w)) and len(f) == len(w)
        and all(isclose(f[token].logprob, w[token].logprob, abs_tol=TOLERANCE) for token in f.keys() & w.keys())
        for f, w in pairs
    )  # fmt: skip


def references(folder: Path) -> dict[str, Any]:
    """Make the references of ``Episode``, by name of the model."""
    return {name: Plain(name, folder / name.replace(" ", "-")) for name in MODELS}


def main(arguments: list[str] | None = None) -> int:
    def start(seed: int, models: dict[str, Any]) -> Episode:
        return Episode(seed, models, always_drafts=seed % 4 > 0)

    description = "random traffic with every option, against a plain engine"
    return fuzz_engine.run_for(110, description, references, start, arguments)


if __name__ == "__main__":
    sys.exit(main())
