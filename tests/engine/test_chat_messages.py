"""Messages as chat templates read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_checkpoint
from weft import LLM, SamplingParams
from weft.engine.chat_messages import template_message
from weft.errors import RequestError


def test_one_form_for_templates() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call], "name": None}
    assert template_message(message, 0, {}) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}],
    }
    assert template_message({"role": "developer", "content": ["a", {"type": "text", "text": "b"}]}, 0, {}) == {
        "role": "system",
        "content": "ab",
    }


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("hello", r"messages\[3\] has no role"),
        ({"content": "x"}, r"messages\[3\] has no role"),
        ({"role": "user"}, r"messages\[3\] has no content"),
        ({"role": "user", "content": 5}, r"messages\[3\].content is neither a text nor a list"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "part of type 'image_url'; this model reads text only"),
        ({"role": "user", "content": [5]}, "part of type None"),
        ({"role": "user", "content": [{"type": "text"}]}, "part of type 'text' without text"),
        ({"role": "user", "content": "x", "tool_calls": [1]}, "a call without a function name"),
    ],
)
def test_what_is_refused(message: Any, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        template_message(message, 3, {}, "")


def test_chat_reads_parts(llm: LLM) -> None:
    """The text of a list of parts was dropped by templates that expect a text."""
    params = SamplingParams(temperature=0.0, max_tokens=2)
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]}]
    plain = [{"role": "user", "content": "hello world"}]
    one, other = (llm.chat(messages, params, use_tqdm=False)[0] for messages in (parts, plain))
    assert one.prompt == other.prompt and "hello world" in (one.prompt or "")
    assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_one_bos(tmp_path: Path) -> None:
    """Tokenizer and chat template both write a BOS: a prompt has one, in a chat and rendered before."""
    make_checkpoint("LlamaForCausalLM", tmp_path, with_tokenizer="sentencepiece")
    params, messages = SamplingParams(max_tokens=1), [{"role": "user", "content": "hello"}]
    with LLM(str(tmp_path), max_num_seqs=2) as llm:
        (chat,) = llm.chat(messages, params, use_tqdm=False)
        assert chat.prompt is not None and chat.prompt.startswith("<s>")
        (text,) = llm.generate(chat.prompt, params, use_tqdm=False)
        (plain,) = llm.generate("hello", params, use_tqdm=False)
    assert chat.prompt_token_ids.count(1) == 1
    assert text.prompt_token_ids == chat.prompt_token_ids
    assert plain.prompt_token_ids[0] == 1 and plain.prompt_token_ids.count(1) == 1
