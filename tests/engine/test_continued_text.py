"""Answers continue their prompt: spaces of SentencePiece-like tokenizers, characters begun in the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny import make_checkpoint
from weft import LLM, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), with_tokenizer="sentencepiece")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """A cramped engine: pages for about 60 tokens."""
    with LLM(str(folder), max_num_seqs=3, max_num_batched_tokens=16, page_size=4, num_kv_pages=16) as engine:
        yield engine


def only(llm: LLM, word: str, count: int, **fields: int) -> SamplingParams:
    assert llm.tokenizer is not None
    token = llm.tokenizer.encode(word, add_special_tokens=False)
    assert len(token) == 1
    return SamplingParams(allowed_token_ids=token, max_tokens=count, ignore_eos=True, **fields)


def test_the_first_word_keeps_its_space(llm: LLM) -> None:
    (output,) = llm.generate("hello", only(llm, "world", 2, n=2), use_tqdm=False)
    assert [o.text for o in output.outputs] == [" world world"] * 2


def test_streamed_pieces_keep_it_too(llm: LLM) -> None:
    llm.add_request("hello", only(llm, "world", 2))
    texts = []
    while not llm.is_finished():
        texts += [output.outputs[0].text for output in llm.step()]
    assert texts == [" world", " world world"]


def test_after_a_preemption(llm: LLM) -> None:
    outputs = llm.generate(["hello the cat"] * 3, only(llm, "world", 30), use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert [output.outputs[0].text for output in outputs] == [" world" * 30] * 3


def test_a_prompt_that_ends_inside_a_character(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("hello 👍")
    params = SamplingParams(allowed_token_ids=ids[-1:], max_tokens=1)
    (output,) = llm.generate([ids[:-1]], params, use_tqdm=False)
    assert output.outputs[0].text == "👍"
