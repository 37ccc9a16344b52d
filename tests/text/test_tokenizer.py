"""Encoding and chat templates."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.small_tokenizers import BYTE_LEVEL, SENTENCEPIECE, SPECIALS, byte_level
from weft.errors import ConfigError, RequestError
from weft.text.chat_template import TemplateOptions
from weft.text.tokenizer import Tokenizer

TEMPLATE = (
    "{%- if tools %}<tools>{{ tools | tojson }}</tools>\n{%- endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{%- endif %}{%- endif %}"
    "{%- if messages[0].role == 'forbidden' %}{{ raise_exception('no such role') }}{%- endif %}"
)


def save(raw: RawTokenizer, folder: Path, **extra: str | bool) -> Path:
    PreTrainedTokenizerFast(tokenizer_object=raw, **extra).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    return save(byte_level(), path, eos_token="<|im_end|>", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


# --- loading and encoding --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "sentencepiece"])
def test_bytes_of_tokens_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    text = "the cat 京👍 é"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert any("\ufffd" in tokenizer.token_text(token) for token in ids)
    joined = b"".join(tokenizer.token_bytes(token) for token in ids)
    assert joined.replace(b" ", b"") == text.encode().replace(b" ", b"")


def test_importing_is_light() -> None:
    check = "import sys, weft.text.tokenizer; assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.parametrize("text", ["the cat", " naïve  café\n", "你好👍🏽", "<|im_start|>user\n<tool_call>", ""])
def test_encode_and_decode_equal_transformers(tokenizer: Tokenizer, folder: Path, text: str) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(text)
    assert ids == theirs.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_properties(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(AutoTokenizer.from_pretrained(tokenizer.hf.name_or_path))
    ids = [tokenizer.encode(t)[0] for t in SPECIALS]
    assert tokenizer.special_token_ids == set(ids)
    assert tokenizer.eos_token_id == ids[2]
    assert tokenizer.bos_token_id is None
    assert tokenizer.has_text(ids[0], skip_special_tokens=False)
    assert not tokenizer.has_text(ids[0], skip_special_tokens=True)
    assert not tokenizer.has_text(10**6, skip_special_tokens=False)


@pytest.mark.parametrize("split", [False, True])
def test_what_a_tokenizer_file_says_of_length_and_special_tokens(tmp_path: Path, split: bool) -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=40)
    folder = save(backend, tmp_path, eos_token="<|im_end|>", split_special_tokens=split)
    theirs = AutoTokenizer.from_pretrained(folder)
    text = "the cat and <|im_end|> the naïve café"
    assert Tokenizer.load(folder).encode(text) == theirs.encode(text)


def test_a_bos_that_the_user_wrote_twice_stays() -> None:
    """Only the one that the tokenizer would add is left out."""
    backend = byte_level()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|im_start|>"))
    assert tokenizer.encode("<|im_start|><|im_start|>a")[:2] == [tokenizer.bos_token_id] * 2


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="not valid Unicode at character 2"):
        tokenizer.encode("ab\ud800")


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer in .*tokenizer\.json.*skip_tokenizer_init"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"version": "1.0", "model": {"type": "Alien"}}', "PK\x03\x04"])
def test_a_broken_tokenizer_file(folder: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_folder_that_wants_to_run_its_own_code(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": [None, "evil.EvilTokenizer"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (tmp_path / "evil.py").write_text("raise SystemExit('code of the checkpoint ran')")
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.load(tmp_path)


# --- chat templates --------------------------------------------------------------------------------------------------

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <|im_end|>"},
    {"role": "assistant", "content": "Hello"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"tools": TOOLS},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_chats_equal_transformers(tokenizer: Tokenizer, folder: Path, options: dict) -> None:
    theirs = {"add_generation_prompt": True, **options}
    variables = theirs.pop("chat_template_kwargs", {})
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        MESSAGES, tokenize=False, **theirs, **variables
    )
    assert tokenizer.template.render(MESSAGES, TemplateOptions(**options)) == expected


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "messages is empty"),
        ([{"content": "x"}], {}, "at least a 'role'"),
        (["hello"], {}, "at least a 'role'"),
        ([{"role": "forbidden", "content": "x"}], {}, "no such role"),
        (MESSAGES, {"continue_final_message": True}, "exclude each other"),
        (MESSAGES, {"chat_template_kwargs": {"tokenize": True, "padding": 1}}, "holds padding, tokenize"),
    ],
)
def test_bad_chats_are_refused(tokenizer: Tokenizer, messages: list, options: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tokenizer.template.render(messages, TemplateOptions(**options))


def test_a_template_in_chat_template_json(folder: Path, tmp_path: Path) -> None:
    """Older multimodal checkpoints keep it there; the tokenizer's own goes first."""
    both = Path(shutil.copytree(folder, tmp_path / "both"))
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    (other / "chat_template.jinja").unlink()
    for path in (both, other):
        (path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    assert Tokenizer.load(other).template.render([{"role": "user", "content": "hi"}]) == "hi!"
    assert Tokenizer.load(both).template.text == TEMPLATE
    (other / "chat_template.json").write_text("{")
    with pytest.raises(ConfigError, match=r"chat_template.json is not valid JSON"):
        Tokenizer.load(other)


def test_a_checkpoint_without_a_template() -> None:
    assert not BYTE_LEVEL.template.exists
    with pytest.raises(RequestError, match="no chat template"):
        BYTE_LEVEL.template.render(MESSAGES)
