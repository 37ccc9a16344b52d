"""Long texts are encoded piece by piece: the same tokens, and no other thread waits."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import stretched
from tests.small_tokenizers import BYTE_LEVEL, SENTENCEPIECE
from weft.config import resolve
from weft.text.encoder import PIECE, cuts, pieces
from weft.text.tokenizer import Tokenizer

MINI = Tokenizer.load(resolve(device="cpu").tokenizer_path)
WORDS = st.sampled_from("the |a1b2 |x=1;|  |\n|\t |don't |東京 |は。|👍🏽 |12,345 |É| -->".split("|"))


@given(st.lists(WORDS, max_size=30).map("".join) | st.text(max_size=40))
def test_every_cut_keeps_the_tokens(text: str) -> None:
    for tokenizer in (MINI, BYTE_LEVEL):
        whole = tokenizer.encode(text, add_special_tokens=False)
        for at in cuts(text):
            parts = [tokenizer.encode(part, add_special_tokens=False) for part in (text[:at], text[at:])]
            assert parts[0] + parts[1] == whole, (text[:at], text[at:])


@pytest.mark.parametrize("text", ["ab " * 30_000, "x" * 50_000, " " * 50_000, "a1" * 30_000, "東京" * 30_000])
def test_pieces_add_up(text: str) -> None:
    parts = list(pieces(text))
    assert "".join(parts) == text
    assert MINI.encode(text) == MINI._backend.encode(text).ids
    assert text.startswith(("x", " ", "東")) or max(map(len, parts)) < 2 * PIECE


def test_a_tokenizer_that_marks_the_start_of_a_text_is_not_cut() -> None:
    assert MINI._encoder._may_cut and BYTE_LEVEL._encoder._may_cut and not SENTENCEPIECE._encoder._may_cut
    text = "the cat " * 5000
    assert SENTENCEPIECE.encode(text) == SENTENCEPIECE._backend.encode(text).ids


def test_what_is_over_the_limit_is_not_encoded() -> None:
    for text in ("one two three " * 500_000, "x" * 7_000_000):
        began = time.process_time()
        assert 1000 < len(MINI.encode(text, limit=1000)) < 2 * PIECE
        assert time.process_time() - began < 1.0  # the whole takes 20


def test_other_threads_go_on() -> None:
    text, done, gaps = "The quick brown fox jumps over 13 dogs. " * 60_000, threading.Event(), [0.0]

    def watch() -> None:
        last = time.monotonic()
        while not done.is_set():
            time.sleep(0.001)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        MINI.encode(text)
    finally:
        done.set()
        watcher.join()
        sys.setswitchinterval(interval)
    assert sorted(gaps)[-3] < stretched(0.1)  # on a busy machine a thread may wait once or twice for other reasons
