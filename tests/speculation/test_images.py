"""Drafts of the model's own head behind prompts with images: the reference's, where it has them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.media import GLM, HYBRID, INDEXED, Engine, Prompt, assert_reference, overrides, reference_inputs
from tests.models.mtp_reference import ReferenceHead, make_mtp_checkpoint
from tests.whole import RUNS_LONG, unless_long
from weft.multimodal.items import MediaItem

NUM_DRAFTS = 3
NUM_TOKENS = 14 if RUNS_LONG else 9


def prompts_of(arch: str) -> list[Prompt]:
    empty = Prompt.of(arch)
    return [
        empty.text(5).image(8, 8, 1).text(7),
        empty.text(12),
        empty.text(3).image(2, 10, 3).image(6, 4, 4).text(2).video(3, 2, 4, 5).text(3),
    ]


@torch.no_grad()
def drafts_of(head: ReferenceHead, tokens: list[int], media: list[MediaItem]) -> list[int]:
    """Greedy drafts for what follows ``tokens``, of which the model has computed all but the last."""
    model, text = head._model[0], head._text[0]
    caught: dict[str, Any] = {}
    hook = text.register_forward_pre_hook(lambda module, args, given: caught.update(given), with_kwargs=True)
    hidden = head.states(lambda: model.model(**reference_inputs(model, tokens, media)))[:-1]
    hook.remove()
    embedded, found = caught["inputs_embeds"][0, 1:], []
    positions = torch.zeros(3, 1, len(hidden)) if GLM in str(type(model)) else caught["position_ids"][-3:, :, :-1]
    for _ in range(NUM_DRAFTS):
        left = head.run(embedded, hidden, positions)[-1]
        found.append(int(model.lm_head(head.output(left)).argmax()))
        embedded = torch.cat([embedded, text.embed_tokens(torch.tensor(found[-1:]))])
        hidden, positions = torch.cat([hidden, left[None]]), torch.cat([positions, positions[..., -1:] + 1], dim=-1)
    return found


@pytest.mark.parametrize(
    ("arch", "mode"), unless_long([(HYBRID, "NONE")], product([HYBRID, INDEXED, GLM], ["NONE", "FULL"]))
)
def test_drafts_are_the_references(arch: str, mode: str, tmp_path: Path) -> None:
    folder, head = make_mtp_checkpoint(arch, tmp_path, **overrides(arch))
    drafts = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
    settings: dict[str, Any] = {"cuda_graph_mode": mode, "speculative_config": drafts, "page_size": 4}
    if mode == "FULL":
        settings["piecewise_cuda_graph_tokens"] = [64]
    engine = Engine(folder, max_num_seqs=3, max_model_len=100, cpu_cache_gib=0.05, **settings)
    prompts = prompts_of(arch)
    requests = [engine.request(prompt, NUM_TOKENS) for prompt in prompts]
    for request in requests:
        engine.core.add(request)
    compared = 0
    while not all(request.is_finished for request in requests):
        engine.core.step()
        for prompt, request in zip(prompts, requests, strict=True):
            done = len(request.output_token_ids)
            room = min(NUM_DRAFTS, NUM_TOKENS - done) if done > 1 else 1
            if request.draft_token_ids and room > 0:
                known = request.known_token_ids.tolist()
                want = drafts_of(head, known, prompt.media) if prompt.media else head.drafts(known, NUM_DRAFTS)
                assert request.draft_token_ids[:room] == want[:room]
                compared += 1
    for prompt, request in zip(prompts, requests, strict=True):
        assert_reference(head._model[0], prompt, request)
    assert min(compared, engine.core.stats().spec_decode_num_drafts) > (20 if RUNS_LONG else 10)
