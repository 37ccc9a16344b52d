"""Prompts of conversations: their turn boundaries, and that what is remembered changes nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.engine.conftest import assert_idle
from tests.media import item
from tests.small_tokenizers import byte_level
from tests.tiny_tokenizer import drop_bos_from_template, save_sentencepiece_tokenizer
from weft import LLM, SamplingParams
from weft.config import resolve
from weft.engine import chat_prompts
from weft.engine.chat_prompts import ChatPrompt, ChatPrompts
from weft.errors import RequestError
from weft.multimodal.placeholders import ExpandedPrompt
from weft.text.chat_template import TemplateOptions
from weft.text.tokenizer import Tokenizer

# Opens a reasoning block for the answer to come, and drops the reasoning of earlier turns, as Qwen's templates do.
REASONS = (
    "{%- set last = namespace(user=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{%- endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.reasoning_content and loop.index0 > last.user %}<think>{{ m.reasoning_content }}</think>{%- endif %}"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{%- endfor %}<|im_end|>"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- if not enable_thinking is false %}<think>\n{%- endif %}"
    "{%- endif %}"
)
# Refuses a system message that does not come first, and opens a block that no history holds.
STRICT = REASONS.replace(
    "{%- for m in messages %}<|im_start|>",
    "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}{{ raise_exception('first!') }}{%- endif %}"
    "<|im_start|>",
)
# The same, each message and the block in lines of their own.
LINES = REASONS.replace("<|im_end|>{%- endfor", "<|im_end|>{{ '\\n' }}{%- endfor").replace(
    "<think>\n{%- endif", "<think>{{ '\\n' }}{%- endif"
)


def with_template(template: str | None) -> Tokenizer:
    tokenizer = Tokenizer.load(resolve(device="cpu").tokenizer_path)
    if template is not None:
        tokenizer.hf.chat_template = template
    return tokenizer


TEMPLATES = {"mini": None, "reasons": REASONS, "strict": STRICT, "lines": LINES}
TOKENIZERS = {name: with_template(template) for name, template in TEMPLATES.items()}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Hi", "reasoning_content": "hm"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "two"}


def reference(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    """Turn boundaries by their definition: three renderings, three encodings."""

    def encode(given: Sequence[Mapping[str, Any]]) -> list[int]:
        return tokenizer.encode(tokenizer.template.render(given, TemplateOptions(**options)), add_special_tokens=False)

    prompt, found = encode(messages), set()
    system = [message for message in messages[:1] if message["role"] == "system"]
    question = {"role": "user", "content": "\u2051 sentinel question"}
    for other in (
        [*messages, {"role": "assistant", "content": "\u2042 sentinel answer"}, question],
        [*system, question],
    ):
        ids = encode(other)
        found.add(next((i for i, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), len(prompt)))
    return sorted(found - {0})


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    """Some turns, with reasoning and tool calls here and there, and at the end something to answer."""

    def say(base: dict[str, Any]) -> dict[str, Any]:
        return base | {
            "content": " ".join(rng.choice(["one", "two 2", "\n\nthree", "<|im_end|>", "é東"]) for _ in range(3))
        }

    messages = [say(SYSTEM)] if rng.random() < 0.5 else []
    for turn in range(rng.randint(1, 3)):
        messages += [say(ANSWER if rng.random() < 0.5 else {"role": "assistant"})] if turn else []
        messages.append(say(USER))
    for _ in range(rng.randint(0, 2)):
        messages += [CALLS | ({"reasoning_content": "so"} if rng.random() < 0.4 else {}), say(RESULT)]
    return messages


@pytest.mark.parametrize("name", TOKENIZERS)
def test_prompts_and_boundaries_are_those_of_the_definition(name: str) -> None:
    tokenizer, rng = TOKENIZERS[name], random.Random(1)
    chats = ChatPrompts(tokenizer)
    assert chats._segments._added is not None
    for _ in range(120):
        options: dict[str, Any] = {"chat_template_kwargs": rng.choice([None, {"enable_thinking": False}])}
        options |= {"tools": rng.choice([None, [CALL]]), "add_generation_prompt": rng.random() < 0.8}
        messages = conversation(rng)
        chat = chats.make(messages, TemplateOptions(**options), turn_boundaries=True)
        assert chat.token_ids == tokenizer.encode(chat.text, add_special_tokens=False)
        assert chat.turn_boundaries == reference(tokenizer, messages, **options), messages
    assert chats._tails and chats._systems


def test_a_known_shape_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_template(REASONS)
    chats, rendered = ChatPrompts(tokenizer), []
    render = tokenizer.template.render
    monkeypatch.setattr(tokenizer.template, "render", lambda *a, **k: rendered.append(1) or render(*a, **k))
    for text in ("one", "two", "three"):
        chats.make([SYSTEM, USER | {"content": text}], turn_boundaries=True)
    assert len(rendered) == 3 + 2


def test_unchanged_messages_are_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_template(None)
    chats, encoded = ChatPrompts(tokenizer), []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **k: encoded.append(text) or encode(text, **k))
    history = [SYSTEM | {"content": "many words " * 2000}, USER]
    chats.make(history)
    encoded.clear()
    chats.make([*history, ANSWER | {"content": "new"}, USER | {"content": "question"}])
    assert sum(map(len, encoded)) < 100


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_prompts, "MAX_CACHED_TOKENS", 1000)
    chats = ChatPrompts(TOKENIZERS["mini"])
    for number in range(100):
        chats.make([USER | {"content": f"{number} words" * 20}])
    kept = [*chats._segments._new.values(), *chats._segments._old.values()]
    assert sum(len(segment.token_ids) for segment in kept) < 3000


def test_what_is_too_long_is_encoded_no_further() -> None:
    chats = ChatPrompts(TOKENIZERS["mini"])
    rendered = chats.render([USER, ANSWER, USER | {"content": "one two three " * 300_000}], turn_boundaries=True)
    began = time.process_time()
    chat = chats.encode(rendered, 4096)
    assert len(chat.token_ids) > 4096 and not chat.turn_boundaries and time.process_time() - began < 1.0
    assert (
        len(chats.make([USER | {"content": "one two three " * 3000}]).token_ids) > 9000
    )  # no part was kept as the whole


def test_a_tokenizer_whose_words_know_their_place_encodes_the_whole() -> None:
    raw = byte_level()
    raw.add_special_tokens([AddedToken("<turn>", lstrip=True, normalized=False)])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw))
    tokenizer.hf.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}  <turn>{% endfor %}"
    chats = ChatPrompts(tokenizer)
    assert chats._segments._added is None
    messages = [USER, {"role": "assistant", "content": "Hi"}, USER]
    chat = chats.make(messages, turn_boundaries=True)
    assert chat.token_ids == tokenizer.encode(chat.text, add_special_tokens=False)
    assert chat.turn_boundaries == reference(tokenizer, messages)


def test_a_system_message_between_turns_stands_where_it_is_or_is_shown_as_the_users() -> None:
    messages = [SYSTEM, USER, SYSTEM | {"content": "Now!"}, USER]
    assert "<|im_start|>system\nNow!" in ChatPrompts(TOKENIZERS["mini"]).make(messages).text
    assert "<|im_start|>userNow!" in ChatPrompts(TOKENIZERS["strict"]).make(messages, turn_boundaries=True).text


def test_template_that_refuses_made_up_turns_gives_no_boundaries() -> None:
    tokenizer = with_template(
        "{% for m in messages %}{% if 'sentinel' in m.content %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
        "{% endfor %}"
    )
    assert ChatPrompts(tokenizer).make([USER], turn_boundaries=True).turn_boundaries == []


def test_next_turn_reuses_the_whole_prompt_when_the_answer_is_rewritten(folder: Path) -> None:
    """The history holds another answer than the one generated, as after dropped reasoning: only that is computed."""
    with LLM(str(folder), max_num_seqs=2) as llm:
        prompt = list(range(100, 170))
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt, "checkpoint_positions": [60]}], params, use_tqdm=False)
        (second,) = llm.generate([[*prompt[:60], 5, 6, 7, 8]], params, use_tqdm=False)
        assert second.num_cached_tokens == 60
        assert_idle(llm)


def test_chat_prompts_carry_their_turn_boundaries(folder: Path) -> None:
    """After the system block and after the turn of the user: what the template gives, counted in tokens."""
    system, user = {"role": "system", "content": "one two"}, {"role": "user", "content": "three four"}
    with LLM(str(folder), max_num_seqs=2) as llm:
        prompt = llm.render_chat([system, user])
        texts = [llm.tokenizer.decode(prompt["prompt_token_ids"][:p]) for p in prompt["checkpoint_positions"]]
        turns = ["system\none two\nuser", "system\none two\nuser\nthree four\nassistant"]
        assert [text.rstrip() for text in texts] == turns
        llm.chat([system, user], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        other_turn = {"role": "user", "content": "seven"}
        (other,) = llm.chat([system, other_turn], SamplingParams(max_tokens=1), use_tqdm=False)
        assert other.num_cached_tokens == prompt["checkpoint_positions"][0]
    with LLM(str(folder), max_num_seqs=2, enable_prefix_caching=False) as llm:
        assert "checkpoint_positions" not in llm.render_chat([system, user])


@pytest.mark.parametrize("writes_bos", [True, False])
def test_a_bos_comes_from_the_template_alone(tmp_path: Path, writes_bos: bool) -> None:
    save_sentencepiece_tokenizer(tmp_path)
    if not writes_bos:
        drop_bos_from_template(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("hello")[0] == tokenizer.bos_token_id, "the tokenizer adds one to other texts"
    token_ids = ChatPrompts(tokenizer).make([{"role": "user", "content": "hello"}]).token_ids
    assert token_ids.count(tokenizer.bos_token_id) == writes_bos


def test_a_chat_keeps_its_salt_and_images_and_has_positions_of_its_own(llm: LLM) -> None:
    image = item("image", (1, 2, 2), 0, [(1, 1)])
    chat = ChatPrompt("text", [5, 6, 7, 8], [2], [image])
    prepared = llm._inputs.encoded_chat(chat, [3], "s", SamplingParams())
    assert (prepared.text, prepared.token_ids, prepared.cache_salt) == ("text", [5, 6, 7, 8], "s")
    assert prepared.checkpoint_positions == [2, 3] and prepared.media == [image]


def test_a_prompt_with_images_keeps_its_salt_and_positions(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """These move behind the placeholders."""
    image = item("image", (1, 2, 2), 0, [(0, 2)])

    def expanded(ids: list[int], positions: list[int], processed: Any, param: str) -> ExpandedPrompt:
        return ExpandedPrompt([9, *ids], [position + 1 for position in positions], [image])

    monkeypatch.setattr(llm._inputs, "media", SimpleNamespace(process=lambda *given: []))
    monkeypatch.setattr(llm._inputs, "with_media", expanded)
    prompt = {"prompt_token_ids": [9, 5, 6], "checkpoint_positions": [2], "cache_salt": "s"}
    prepared = llm._inputs.prepare_prompt(prompt | {"multi_modal_data": {"image": ["a.png"]}})
    assert (prepared.token_ids, prepared.checkpoint_positions) == ([9, 9, 5, 6], [3])
    assert prepared.cache_salt == "s" and prepared.media == [image]


def test_salted_prompts_share_nothing(folder: Path) -> None:
    with LLM(str(folder), max_num_seqs=2) as llm:
        prompt, params = list(range(100, 170)), SamplingParams(max_tokens=1)
        salted = [{"prompt_token_ids": prompt, "cache_salt": salt} for salt in ("a", "b", "a")]
        found = [llm.generate([p], params, use_tqdm=False)[0].num_cached_tokens for p in salted]
        assert found == [0, 0, 69]


@pytest.mark.parametrize("positions", [[0], [71], [True], "12", [1.0], 5])
def test_positions_that_are_none_are_refused(folder: Path, llm: LLM, positions: Any) -> None:
    with pytest.raises(RequestError, match="checkpoint_positions"):
        llm.generate([{"prompt_token_ids": list(range(70)), "checkpoint_positions": positions}])


@pytest.mark.parametrize("salt", ["", 5])
def test_salts_that_are_none_are_refused(llm: LLM, salt: Any) -> None:
    with pytest.raises(RequestError, match="cache_salt"):
        llm.generate([{"prompt_token_ids": [1], "cache_salt": salt}])
