"""The encoder cache: rows, the budget of a step, who makes room for whom."""

from __future__ import annotations

import random

import pytest

from tests.media import Prompt
from tests.scheduler.test_scheduler import Rig, expect, make_request
from weft.multimodal.items import MediaItem
from weft.request import Request
from weft.scheduler.encoder_cache import EncoderCache


def image(tokens: int, seed: int) -> Prompt:
    return Prompt().image(2, 2 * tokens, seed, bare=True)


def rows_of(cache: EncoderCache, media: list[MediaItem], num_tokens: int) -> list[tuple[int, int, int]]:
    return cache.sources(media, 0, num_tokens)


def test_an_image_is_encoded_once_and_kept() -> None:
    cache = EncoderCache(num_rows=20, step_budget=10)
    prompt = Prompt().text(3).image(2, 8, 1).text(5)  # 3 text, start, 4 of the image, end, 5 text
    cache.begin_step()
    assert cache.reach(prompt.media, 0, 6) == 6  # cut inside the image
    (encoding,) = cache.take_encodings()
    assert (encoding.item, encoding.row) == (prompt.media[0], 0)
    assert cache.sources(prompt.media, 0, 6) == [(4, 2, 0)]
    cache.begin_step()
    assert cache.reach(prompt.media, 6, 8) == 8 and cache.take_encodings() == []
    assert cache.sources(prompt.media, 6, 8) == [(6, 2, 2)]
    cache.begin_step()
    again = Prompt().image(2, 8, 1)
    assert cache.reach(again.media, 0, 6) == 6 and cache.take_encodings() == []
    assert cache.stats()["num_encoder_queries"] == 2 and cache.stats()["num_encoder_hits"] == 1


def test_frames_of_a_video_take_consecutive_rows() -> None:
    cache = EncoderCache(20, 20)
    video = Prompt().video(3, 2, 4, 1)  # frames of 2 tokens at 2, 7, 11 ...
    cache.begin_step()
    assert cache.reach(video.media, 0, len(video.token_ids)) == len(video.token_ids)
    runs = video.media[0].placeholders
    assert rows_of(cache, video.media, 99) == [(offset, 2, 2 * i) for i, (offset, _) in enumerate(runs)]


def test_the_budget_of_a_step_stops_before_the_next_image() -> None:
    cache = EncoderCache(30, 10)
    prompt = Prompt().image(2, 12, 1).text(2).image(2, 10, 2)  # 6 and 5 tokens
    cache.begin_step()
    assert cache.reach(prompt.media, 0, 99) == prompt.media[1].placeholders[0][0]
    other = image(4, 3)
    assert cache.reach(other.media, 0, 4) == 4  # what is left of it
    assert len(cache.take_encodings()) == 2
    cache.begin_step()
    assert cache.reach(prompt.media, prompt.media[1].placeholders[0][0], 5) == 5


def test_what_a_step_that_was_not_launched_asked_for_is_forgotten() -> None:
    cache, first, second = EncoderCache(30, 10), image(6, 1), image(5, 2)
    cache.begin_step()
    assert cache.reach(first.media, 0, 6) == 6
    cache.begin_step()
    assert cache.reach(second.media, 0, 5) == 5 and len(cache.take_encodings()) == 1
    cache.begin_step()
    assert cache.reach(first.media, 0, 6) == 6 and len(cache.take_encodings()) == 1


def test_an_image_that_was_asked_for_by_one_that_has_gone_keeps_nobody_waiting() -> None:
    """The image's request found no page, as the last token of another request was in flight. No step was launched."""
    rig = Rig(pages=9, seqs=2, budget=2, hybrid=False)
    rig.scheduler.encoder = cache = EncoderCache(num_rows=12, step_budget=6)
    rig.scheduler.add(make_request("text", list(range(14)), max_tokens=9))
    rig.scheduler.add(of_image("gone", Prompt().text(8).image(2, 8, 1, bare=True)))
    for _ in range(20):
        rig.step(1)
        if cache._encodings:
            break
    assert cache._encodings and not rig.in_flight, "what the test is about does not come about"
    rig.scheduler.finish("gone", "abort")
    rig.scheduler.add(other := of_image("other", image(6, 2)))
    rig.run(1, limit=50)
    expect(other)


def of_image(name: str, prompt: Prompt) -> Request:
    request = make_request(name, prompt.token_ids, max_tokens=2, arrival=1)
    request.media = prompt.media  # type: ignore[misc]  # no field of the spec alone
    return request


def test_the_image_used_longest_ago_makes_room() -> None:
    cache = EncoderCache(10, 10)
    for seed, num_encoded in ((1, 1), (2, 1), (1, 0), (3, 1), (1, 0), (2, 1)):
        cache.begin_step()
        assert cache.reach(image(4, seed).media, 0, 4) == 4 and len(cache.take_encodings()) == num_encoded


def test_images_of_this_step_make_no_room() -> None:
    cache = EncoderCache(8, 8)
    a, b = image(5, 1), image(4, 2)
    cache.begin_step()
    assert cache.reach(a.media, 0, 5) == 5
    assert cache.reach(b.media, 0, 4) == 0
    cache.take_encodings()
    cache.begin_step()
    assert cache.reach(b.media, 0, 4) == 4  # and a is gone
    cache.take_encodings()
    cache.begin_step()
    assert cache.reach(a.media, 0, 5) == 5 and len(cache.take_encodings()) == 1


def test_what_a_broken_step_was_to_encode_is_forgotten() -> None:
    cache = EncoderCache(8, 8)
    a = image(5, 1)
    cache.begin_step()
    cache.reach(a.media, 0, 5)
    cache.discard(cache.take_encodings())
    cache.begin_step()
    assert cache.reach(a.media, 0, 5) == 5 and len(cache.take_encodings()) == 1


@pytest.mark.parametrize("seed", range(3))
def test_rows_have_one_owner_and_the_first_always_gets_its_image(seed: int) -> None:
    rng, cache = random.Random(seed), EncoderCache(24, 12)
    images = [image(rng.randint(1, 12), 10 * seed + i) for i in range(9)]
    for _ in range(60):
        cache.begin_step()
        wanted = [rng.choice(images) for _ in range(3)]
        reached = [cache.reach(p.media, 0, len(p.token_ids)) for p in wanted]
        assert reached[0] == len(wanted[0].token_ids)
        for prompt, tokens in zip(wanted, reached, strict=True):
            if tokens:
                assert sum(count for _, count, _ in rows_of(cache, prompt.media, tokens)) == tokens
        assert sum(e.item.num_tokens for e in cache.take_encodings()) <= 12
        cache.check()
