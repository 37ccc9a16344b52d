"""Encoding, chat templates, incremental detokenisation and stop strings."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from weft.errors import ConfigError, RequestError
from weft.tokenizer import IncrementalDetokenizer, StopStrings, Tokenizer

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{%- if tools %}<tools>{{ tools | tojson }}</tools>\n{%- endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{%- endif %}{%- endif %}"
    "{%- if messages[0].role == 'forbidden' %}{{ raise_exception('no such role') }}{%- endif %}"
)
CORPUS = ["the cat sat on the mat, 123 times", "naïve café 你好世界 👍🏽 ünïcödé", "tool_call stop the end"] * 5


def byte_level() -> RawTokenizer:
    """Byte-level BPE, as Qwen and Llama 3 have it."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False))
    raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    raw.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return raw


def sentencepiece_like() -> RawTokenizer:
    """Word-start markers and byte fallback, as Llama 2 has them."""
    words = ["▁", "▁the", "▁cat", "s", "a", "t", "▁a", "é"]
    vocab = {token: i for i, token in enumerate(["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return raw


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


BYTE_LEVEL = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|im_end|>"))
SENTENCEPIECE = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like()))


# --- loading and encoding --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "sentencepiece"])
def test_bytes_of_tokens_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    text = "the cat 京👍 é"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert any("\ufffd" in tokenizer.token_text(token) for token in ids)
    joined = b"".join(tokenizer.token_bytes(token) for token in ids)
    assert joined.replace(b" ", b"") == text.encode().replace(b" ", b"")


def test_importing_is_light() -> None:
    check = "import sys, weft.tokenizer; assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
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
    assert tokenizer.render_chat(MESSAGES, **options) == expected


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
        tokenizer.render_chat(messages, **options)


def test_a_template_in_chat_template_json(folder: Path, tmp_path: Path) -> None:
    """Older multimodal checkpoints keep it there; the tokenizer's own goes first."""
    both = Path(shutil.copytree(folder, tmp_path / "both"))
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    (other / "chat_template.jinja").unlink()
    for path in (both, other):
        (path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    assert Tokenizer.load(other).render_chat([{"role": "user", "content": "hi"}]) == "hi!"
    assert Tokenizer.load(both).chat_template == TEMPLATE
    (other / "chat_template.json").write_text("{")
    with pytest.raises(ConfigError, match=r"chat_template.json is not valid JSON"):
        Tokenizer.load(other)


def test_a_checkpoint_without_a_template() -> None:
    assert not BYTE_LEVEL.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        BYTE_LEVEL.render_chat(MESSAGES)


# --- incremental detokenisation --------------------------------------------------------------------------------------


def pieces_of(tokenizer: Tokenizer, ids: list[int], skip: bool = True, together: int = 1) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    groups = [ids[i : i + together] for i in range(0, len(ids), together)]
    return [*(detokenizer.extend(group) for group in groups), detokenizer.finish()]


TOGETHER = st.sampled_from([1, 1, 2, 3, 7, 200])
"""How many ids come at a time."""


@given(st.text(max_size=60), st.booleans(), TOGETHER)
@settings(max_examples=150, deadline=None)
def test_pieces_of_any_text_add_up_and_are_whole_characters(text: str, skip: bool, together: int) -> None:
    ids = BYTE_LEVEL.encode(text)
    pieces = pieces_of(BYTE_LEVEL, ids, skip, together)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd"), "half a character was shown"


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=60), st.booleans(), TOGETHER)
@settings(max_examples=300, deadline=None)
def test_pieces_of_any_ids_add_up(ids: list[int], skip: bool, together: int) -> None:
    """Random ids: broken characters, special tokens in their midst, ids without a token."""
    assert "".join(pieces_of(BYTE_LEVEL, ids, skip, together)) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(
    st.lists(st.sampled_from(["▁", "▁the", "▁cat", "s", "t", "é", "</s>", "你", "👍", "\n", "ß"]), max_size=30),
    st.booleans(),
    TOGETHER,
)
@settings(max_examples=300, deadline=None)
def test_spaces_and_byte_fallback_of_sentencepiece(parts: list[str], skip: bool, together: int) -> None:
    vocab = SENTENCEPIECE._backend.get_vocab()
    ids = [i for p in parts for i in ([vocab[p]] if p in vocab else [vocab[f"<0x{b:02X}>"] for b in p.encode()])]
    pieces = pieces_of(SENTENCEPIECE, ids, skip, together)
    assert "".join(pieces) == SENTENCEPIECE.decode(ids, skip_special_tokens=skip)
    assert not any("\ufffd" in piece for piece in pieces)


def test_characters_come_out_as_soon_as_they_are_whole() -> None:
    ids = [i for b in "a👍b".encode() for i in [BYTE_LEVEL._backend.token_to_id(BYTE_CHARS[b])]]
    assert pieces_of(BYTE_LEVEL, ids) == ["a", "", "", "", "👍", "b", ""]


BYTE_CHARS = dict(
    zip(
        [
            *range(ord("!"), ord("~") + 1),
            *range(0xA1, 0xAD),
            *range(0xAE, 0x100),
            *range(0x21),
            *range(0x7F, 0xA1),
            0xAD,
        ],
        [*map(chr, range(ord("!"), ord("~") + 1)), *map(chr, range(0xA1, 0xAD)), *map(chr, range(0xAE, 0x100))]
        + [chr(0x100 + i) for i in range(68)],
        strict=True,
    )
)


def test_a_real_replacement_character_is_not_held_for_ever() -> None:
    ids = BYTE_LEVEL.encode("\ufffd" * 3 + "ab")
    pieces = pieces_of(BYTE_LEVEL, ids)
    assert "".join(pieces) == "\ufffd\ufffd\ufffdab"
    assert "".join(pieces[:-1]) == "\ufffd\ufffd\ufffdab"
    assert "".join(pieces_of(BYTE_LEVEL, BYTE_LEVEL.encode("\ufffd"))) == "\ufffd"
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    shown = "".join(detokenizer.extend([i]) for i in BYTE_LEVEL.encode("\ufffd" * 500))
    assert len(shown) >= 497


def test_the_window_stays_short() -> None:
    broken = BYTE_LEVEL._backend.token_to_id(BYTE_CHARS[0x80])
    for ids in (BYTE_LEVEL.encode("the cat 你好 " * 300), [broken] * 2000, BYTE_LEVEL.encode("<|im_end|>") * 2000):
        detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
        longest = 0
        for i in ids:
            detokenizer.extend([i])
            longest = max(longest, len(detokenizer._window))
        assert longest <= 2 * IncrementalDetokenizer.MAX_HELD + 2


def continued(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=prompt)
    return "".join([*(detokenizer.extend([i]) for i in ids), detokenizer.finish()])


def sentencepiece_ids(text: str) -> list[int]:
    """``▁the``, ``▁cat`` and single letters where there are such tokens, else bytes."""
    vocab = SENTENCEPIECE._backend.get_vocab()
    parts = re.findall("▁the|▁cat|.", text.replace(" ", "▁"), re.DOTALL)
    return [i for p in parts for i in ([vocab[p]] if p in vocab else [vocab[f"<0x{b:02X}>"] for b in p.encode()])]


def test_the_space_between_prompt_and_text() -> None:
    the, cat = sentencepiece_ids(" the cat")
    assert continued(SENTENCEPIECE, [], [cat]) == "cat"
    assert continued(SENTENCEPIECE, [the], [cat]) == " cat"
    assert continued(SENTENCEPIECE, [the, SENTENCEPIECE.encode("</s>")[-1]], [cat]) == " cat"


def byte_ids(text: str) -> list[int]:
    return [BYTE_LEVEL._backend.token_to_id(BYTE_CHARS[b]) for b in text.encode()]


@given(
    st.lists(st.sampled_from(["a", " ", " the", " cat", "é", "ß", "你", "👍", "\n"]), min_size=1, max_size=24),
    st.integers(0, 100),
    st.sampled_from([(BYTE_LEVEL, byte_ids), (SENTENCEPIECE, sentencepiece_ids)]),
)
@settings(max_examples=400, deadline=None)
def test_prompt_and_text_add_up_wherever_the_prompt_ends(parts: list[str], place: int, how: tuple) -> None:
    """Also within a character: that one belongs to the text then, whole."""
    tokenizer, encode = how
    ids = encode("".join(parts))
    cut = place % len(ids)
    begun = next(n for n in range(4) if not tokenizer.decode(ids[: cut - n]).endswith("\ufffd"))
    text = continued(tokenizer, ids[:cut], ids[cut:])
    assert text == tokenizer.decode(ids)[len(tokenizer.decode(ids[: cut - begun])) :]
    assert "\ufffd" not in text


@pytest.mark.parametrize(("prompt", "ids", "text"), [("\ufffd", "b", "b"), ("x\ufffd", "👍", "👍")])
def test_a_replacement_character_in_the_prompt_is_not_repeated(prompt: str, ids: str, text: str) -> None:
    assert continued(BYTE_LEVEL, byte_ids(prompt), byte_ids(ids)) == text


def test_a_character_that_the_prompt_began_and_nothing_completes() -> None:
    assert continued(BYTE_LEVEL, byte_ids("a👍")[:3], byte_ids("b")) == "b"
    assert continued(BYTE_LEVEL, byte_ids("a👍")[:3], []) == ""


# --- stop strings ----------------------------------------------------------------------------------------------------


def feed(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    finder = StopStrings(stops, include=include)
    text = "".join(finder.append(p) for p in pieces)
    return text + finder.finish(), finder.matched


def definition(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """The stop string complete first; of those that end together the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    return [text[a:b] for a, b in pairwise(borders)]


few_letters = st.text(alphabet="abé👍", max_size=30)


@given(
    st.lists(st.text(alphabet="abé👍", min_size=1, max_size=5), min_size=1, max_size=4),
    few_letters,
    st.lists(st.integers(0, 100), max_size=12),
    st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_any_cut_gives_the_same_result(stops: list[str], text: str, places: list[int], include: bool) -> None:
    assert feed(stops, cut(text, places), include) == definition(stops, text, include)


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.text(alphabet="ab", max_size=20),
)
@settings(max_examples=200, deadline=None)
def test_what_is_shown_is_never_taken_back(stops: list[str], text: str) -> None:
    """Each shown piece is part of the final answer, and nothing is held that cannot become a stop string."""
    finder, shown = StopStrings(stops), ""
    final, _ = definition(stops, text, include=False)
    for i, letter in enumerate(text):
        shown += finder.append(letter)
        assert final.startswith(shown)
        if finder.matched is None:
            held = text[len(shown) : i + 1]
            assert held == "" or any(s.startswith(held) and s != held for s in stops)


@given(st.text(alphabet="abé👍<", max_size=30), st.sampled_from(["é👍", "b<|im_end|>", "a", "<|im_end|>"]))
@settings(max_examples=100, deadline=None)
def test_through_tokens_and_special_tokens(text: str, stop: str) -> None:
    ids = BYTE_LEVEL.encode(text + "<|im_end|>" + text)
    pieces = pieces_of(BYTE_LEVEL, ids, skip=False)
    assert feed([stop], pieces) == definition([stop], text + "<|im_end|>" + text, include=False)


def test_before_min_tokens_nothing_stops() -> None:
    finder = StopStrings(["ab", "abc"])
    shown = finder.append("xab", may_stop=False)
    assert finder.matched is None
    shown += finder.append("d")
    assert shown == "xabd"
    assert finder.append("ab!") == ""
    assert finder.matched == "ab"


def test_a_stop_that_began_before_min_tokens_counts_when_it_ends_after() -> None:
    finder = StopStrings(["stop"])
    assert finder.append("xst", may_stop=False) == "x"
    assert finder.append("op y") == ""
    assert finder.matched == "stop"
    assert finder.append("more") == ""
    assert finder.finish() == ""
