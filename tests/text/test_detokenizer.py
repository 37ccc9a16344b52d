"""Incremental detokenisation and stop strings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.small_tokenizers import BYTE_LEVEL, SENTENCEPIECE
from weft.text.detokenizer import Detokenizer, StopStrings, WindowDetokenizer, make_detokenizer
from weft.text.tokenizer import Tokenizer

Maker = Callable[..., Detokenizer]

# --- incremental detokenisation --------------------------------------------------------------------------------------


def pieces_of(
    tokenizer: Tokenizer, ids: list[int], skip: bool = True, together: int = 1, make: Maker = make_detokenizer
) -> list[str]:
    detokenizer = make(tokenizer, skip_special_tokens=skip)
    groups = [ids[i : i + together] for i in range(0, len(ids), together)]
    return [*(detokenizer.extend(group) for group in groups), detokenizer.finish()]


MAKERS = (make_detokenizer, WindowDetokenizer)
"""The one that suits the vocabulary, and the one for any."""

TOGETHER = st.sampled_from([1, 1, 2, 3, 7, 200])
"""How many ids come at a time."""


@given(st.text(max_size=60), st.booleans(), TOGETHER, st.sampled_from(MAKERS))
@settings(max_examples=150, deadline=None)
def test_pieces_of_any_text_add_up_and_are_whole_characters(text: str, skip: bool, together: int, make: Maker) -> None:
    ids = BYTE_LEVEL.encode(text)
    pieces = pieces_of(BYTE_LEVEL, ids, skip, together, make)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd"), "half a character was shown"


@given(
    st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=60), st.booleans(), TOGETHER, st.sampled_from(MAKERS)
)
@settings(max_examples=300, deadline=None)
def test_pieces_of_any_ids_add_up(ids: list[int], skip: bool, together: int, make: Maker) -> None:
    """Random ids: broken characters, special tokens in their midst, ids without a token."""
    assert "".join(pieces_of(BYTE_LEVEL, ids, skip, together, make)) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


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


@pytest.mark.parametrize("make", MAKERS)
def test_characters_come_out_as_soon_as_they_are_whole(make: Maker) -> None:
    ids = [i for b in "a👍b".encode() for i in [BYTE_LEVEL._backend.token_to_id(BYTE_CHARS[b])]]
    assert pieces_of(BYTE_LEVEL, ids, make=make) == ["a", "", "", "", "👍", "b", ""]


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


@pytest.mark.parametrize("make", MAKERS)
def test_a_real_replacement_character_is_not_held_for_ever(make: Maker) -> None:
    ids = BYTE_LEVEL.encode("\ufffd" * 3 + "ab")
    pieces = pieces_of(BYTE_LEVEL, ids, make=make)
    assert "".join(pieces) == "\ufffd\ufffd\ufffdab"
    assert "".join(pieces[:-1]) == "\ufffd\ufffd\ufffdab"
    assert "".join(pieces_of(BYTE_LEVEL, BYTE_LEVEL.encode("\ufffd"), make=make)) == "\ufffd"
    detokenizer = make(BYTE_LEVEL)
    shown = "".join(detokenizer.extend([i]) for i in BYTE_LEVEL.encode("\ufffd" * 500))
    assert len(shown) >= 497


def test_the_window_stays_short() -> None:
    broken = BYTE_LEVEL._backend.token_to_id(BYTE_CHARS[0x80])
    for ids in (BYTE_LEVEL.encode("the cat 你好 " * 300), [broken] * 2000, BYTE_LEVEL.encode("<|im_end|>") * 2000):
        detokenizer = WindowDetokenizer(BYTE_LEVEL)
        longest = 0
        for i in ids:
            detokenizer.extend([i])
            longest = max(longest, len(detokenizer._window))
        assert longest <= 2 * WindowDetokenizer.MAX_HELD + 2


def continued(tokenizer: Tokenizer, prompt: list[int], ids: list[int], make: Maker = make_detokenizer) -> str:
    detokenizer = make(tokenizer, prompt_token_ids=prompt)
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


def ids_of(content: Iterable[int]) -> list[int]:
    """The id of each byte."""
    return [BYTE_LEVEL._backend.token_to_id(BYTE_CHARS[b]) for b in content]


def byte_ids(text: str) -> list[int]:
    return ids_of(text.encode())


@given(
    st.lists(st.sampled_from(["a", " ", " the", " cat", "é", "ß", "你", "👍", "\n"]), min_size=1, max_size=24),
    st.integers(0, 100),
    st.sampled_from([(BYTE_LEVEL, byte_ids), (SENTENCEPIECE, sentencepiece_ids)]),
    st.sampled_from(MAKERS),
)
@settings(max_examples=400, deadline=None)
def test_prompt_and_text_add_up_wherever_the_prompt_ends(parts: list[str], place: int, how: tuple, make: Maker) -> None:
    """Also within a character: that one belongs to the text then, whole."""
    tokenizer, encode = how
    ids = encode("".join(parts))
    cut = place % len(ids)
    begun = next(n for n in range(4) if not tokenizer.decode(ids[: cut - n]).endswith("\ufffd"))
    text = continued(tokenizer, ids[:cut], ids[cut:], make)
    assert text == tokenizer.decode(ids)[len(tokenizer.decode(ids[: cut - begun])) :]
    assert "\ufffd" not in text


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("prompt", "ids", "text"), [("\ufffd", "b", "b"), ("x\ufffd", "👍", "👍")])
def test_a_replacement_character_in_the_prompt_is_not_repeated(prompt: str, ids: str, text: str, make: Maker) -> None:
    assert continued(BYTE_LEVEL, byte_ids(prompt), byte_ids(ids), make) == text


@pytest.mark.parametrize("make", MAKERS)
def test_a_character_that_the_prompt_began_and_nothing_completes(make: Maker) -> None:
    assert continued(BYTE_LEVEL, byte_ids("a👍")[:3], byte_ids("b"), make) == "b"
    assert continued(BYTE_LEVEL, byte_ids("a👍")[:3], [], make) == ""


BROKEN = st.lists(st.sampled_from([*b"ab\xe2\x82\xac\xed\xa7\xf0\x9f\x91\x8d\xff"]), max_size=7)
"""Bytes of characters, cut anywhere; ED A7 would begin a surrogate, which UTF-8 has not."""


@given(BROKEN, BROKEN)
@example([*b"E\xed\xa7"], [*b"f"])
@settings(max_examples=300, deadline=None)
def test_text_behind_any_bytes(prompt: list[int], new: list[int]) -> None:
    """A character that the prompt leaves broken is the prompt's. A character that is completed is the text's."""
    before, both = (bytes(b).decode(errors="replace") for b in (prompt, prompt + new))
    common = next((i for i, (a, b) in enumerate(zip(before, both, strict=False)) if a != b), len(before))
    assert continued(BYTE_LEVEL, ids_of(prompt), ids_of(new)) == both[common:]


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
