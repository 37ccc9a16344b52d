"""Images through the offline interface: from prompts and messages to the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.media import GLM, HYBRID, INKLING2, overrides, reference_logits
from tests.pictures import (
    GLM_TOP,
    INKLING_TOP,
    TOP,
    encoded,
    picture,
    save_glm_processor,
    save_inkling2_processor,
    save_processor,
)
from tests.tiny import make_checkpoint, make_model
from tests.tiny_tokenizer import VOCAB_SIZE
from weft import LLM, SamplingParams
from weft.errors import ContextLengthError, RequestError

PARAMS = SamplingParams(temperature=0.0, max_tokens=4)
PAD = "<|vision_start|><|image_pad|><|vision_end|>"
PROMPT = f"look {PAD} and {PAD}."


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A hybrid model, whose prompts have checkpoint positions."""
    keys: dict[str, Any] = overrides(HYBRID) | {"top": TOP, "vocab_size": VOCAB_SIZE}
    folder = make_checkpoint(HYBRID, tmp_path_factory.mktemp("vision"), **keys)
    save_processor(folder)
    with LLM(str(folder), cpu_cache_gib=0.05, max_model_len=300, max_num_batched_tokens=48) as llm:
        yield llm


def run(llm: LLM, prompt: Any, params: SamplingParams = PARAMS) -> Any:
    return llm.generate(prompt, params, use_tqdm=False)[0]


def test_text_and_ids(llm: LLM, tmp_path: Path) -> None:
    """Text or token ids and images from any source yield the same tokens. The order of images matters."""
    one, other = picture(40, 24), picture(40, 24, seed=1)
    path = tmp_path / "one.png"
    path.write_bytes(encoded(one))
    by_text = run(llm, {"prompt": PROMPT, "multi_modal_data": {"image": [one, other]}})
    assert by_text.prompt == PROMPT and by_text.prompt_token_ids.count(5) == 2 * 15
    ids = llm.get_tokenizer().encode(PROMPT)
    assert ids.count(5) == 2
    images = {"image": [str(path), np.asarray(other)]}
    by_ids = run(llm, {"prompt_token_ids": ids, "multi_modal_data": images})
    assert by_ids.prompt_token_ids == by_text.prompt_token_ids
    assert by_ids.outputs[0].token_ids == by_text.outputs[0].token_ids
    assert by_ids.num_cached_tokens == len(by_text.prompt_token_ids) - 1
    swapped = run(llm, {"prompt": PROMPT, "multi_modal_data": {"image": [other, one]}})
    assert swapped.num_cached_tokens < 8


def test_chat_has_turn_boundaries_behind_its_images(llm: LLM) -> None:
    """Checkpoint positions count the image's tokens: the second turn computes what is new, and no image."""
    first = [{"role": "user", "content": ["what ", {"type": "image", "image": picture(48, 48)}, " is it?"]}]
    rendered = llm.render_chat(first)
    assert max(rendered["checkpoint_positions"]) <= len(rendered["prompt_token_ids"]) < 40
    answer = llm.chat(first, PARAMS, use_tqdm=False)[0]
    num_encoded = llm.stats().num_encoder_queries
    second = [*first, {"role": "assistant", "content": "a cat"}, {"role": "user", "content": "sure?"}]
    again = llm.chat(second, PARAMS, use_tqdm=False)[0]
    boundary = max(rendered["checkpoint_positions"]) + 36 - 1
    assert again.num_cached_tokens == boundary <= len(answer.prompt_token_ids)
    assert llm.stats().num_encoder_queries == num_encoded


def test_several_completions_of_one_image(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=4, n=2, seed=1)
    output = run(llm, {"prompt": PAD, "multi_modal_data": {"image": picture(16, 16)}}, params)
    single = SamplingParams(temperature=1.0, max_tokens=4, seed=1)
    alone = run(llm, {"prompt": PAD, "multi_modal_data": {"image": picture(16, 16)}}, single)
    assert len(output.outputs) == 2 and output.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ({"prompt": PROMPT, "multi_modal_data": {"image": picture()}}, "2 image placeholders .* and 1 images"),
        ({"prompt": "x", "multi_modal_data": {"image": picture()}}, "0 image placeholders .* and 1 images"),
        ({"prompt": PROMPT}, "2 image placeholders .* and 0 images"),
        (PROMPT, "2 image placeholders .* and 0 images"),
        ([7, 5, 7], "1 image placeholders .* and 0 images"),
        ({"prompt": "x", "multi_modal_data": {"audio": 1}}, "must be a dict with image, video or both"),
        ({"prompt": "x", "multi_modal_data": [picture()]}, "must be a dict with image, video or both"),
        ({"prompt": "x", "multi_modal_uuids": {}}, "unknown keys .*allowed are .*multi_modal_data"),
    ],
)
def test_refused(llm: LLM, prompt: Any, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        run(llm, prompt)


def test_too_long(llm: LLM) -> None:
    image = picture(64, 64)
    with pytest.raises(ContextLengthError, match="first 5 of the prompt's 5 images"):
        run(llm, {"prompt": PAD * 5, "multi_modal_data": {"image": [image] * 5}})
    with pytest.raises(ContextLengthError, match="maximum context length is 300 tokens"):
        run(llm, {"prompt": PAD * 4 + "x" * 90, "multi_modal_data": {"image": [image] * 4}})
    with pytest.raises(ContextLengthError, match="maximum context length is 300 tokens"):
        run(llm, {"prompt": "x " * 20_000 + PAD, "multi_modal_data": {"image": image}})
    params = SamplingParams(truncate_prompt_tokens=20, max_tokens=1)
    with pytest.raises(RequestError, match="off a prompt with images"):
        run(llm, {"prompt": PAD, "multi_modal_data": {"image": image}}, params)


def test_a_model_that_reads_text_only() -> None:
    with LLM(cpu_cache_gib=0.05, max_model_len=64) as llm:
        with pytest.raises(RequestError, match="reads text only: the checkpoint has no vision tower"):
            run(llm, {"prompt": "x", "multi_modal_data": {"image": picture()}})
        with pytest.raises(RequestError, match="'image'; this model reads text only: the checkpoint has no vision"):
            llm.chat([{"role": "user", "content": [{"type": "image", "image": picture()}]}])


def test_messages_of_glm(tmp_path: Path) -> None:
    """From a chat with images and a video to the tokens of transformers; a second run computes no image."""
    keys: dict[str, Any] = overrides(GLM) | {"top": GLM_TOP, "vocab_size": VOCAB_SIZE}
    folder, reference = make_checkpoint(GLM, tmp_path, **keys), make_model(GLM, **keys)
    save_glm_processor(folder)
    frames = [np.asarray(picture(20, 30, seed)) for seed in range(6)]
    parts = [{"type": "image", "image": picture(40, 24)}, {"type": "video", "video": (frames, {"fps": 4.0})}]
    parts += [{"type": "image", "image": picture(64, 64, 1)}, {"type": "text", "text": "what?"}]
    with LLM(str(folder), cpu_cache_gib=0.05, max_model_len=300, max_num_batched_tokens=48) as llm:
        prepared = llm._inputs.prepare_prompt(
            {"prompt": llm.render_chat([{"role": "user", "content": parts}])["prompt"], "multi_modal_data": {
                "image": [parts[0]["image"], parts[2]["image"]], "video": [parts[1]["video"]]}}
        )  # fmt: skip
        first, again = (llm.chat([{"role": "user", "content": parts}], PARAMS, use_tqdm=False)[0] for _ in range(2))
        assert llm.stats().num_encoder_queries == 3
    assert [item.modality for item in prepared.media] == ["image", "video", "image"]
    assert first.prompt_token_ids == prepared.token_ids and prepared.token_ids.count(5) == 15 + 2 * 12 + 64
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    assert again.num_cached_tokens == len(prepared.token_ids) - 1
    logits = reference_logits(reference, prepared.token_ids + first.outputs[0].token_ids, prepared.media)
    assert logits[len(prepared.token_ids) - 1 : -1].argmax(-1).tolist() == first.outputs[0].token_ids


def test_messages_of_inkling_2(tmp_path: Path) -> None:
    """From a chat with images to the tokens of transformers; a second run computes no image. Videos are refused."""
    keys: dict[str, Any] = overrides(INKLING2) | {"top": INKLING_TOP, "vocab_size": VOCAB_SIZE}
    keys["unpadded_vocab_size"] = VOCAB_SIZE
    folder, reference = make_checkpoint(INKLING2, tmp_path, **keys), make_model(INKLING2, **keys)
    save_inkling2_processor(folder)
    images = [picture(40, 23), picture(64, 64, 1)]
    parts: list[Any] = [{"type": "image", "image": images[0]}, {"type": "image", "image": images[1]}, "what?"]
    with LLM(str(folder), cpu_cache_gib=0.05, max_model_len=300, max_num_batched_tokens=48) as llm:
        text = llm.render_chat([{"role": "user", "content": parts}])["prompt"]
        prepared = llm._inputs.prepare_prompt({"prompt": text, "multi_modal_data": {"image": images}})
        first, again = (llm.chat([{"role": "user", "content": parts}], PARAMS, use_tqdm=False)[0] for _ in range(2))
        assert llm.stats().num_encoder_queries == 2
        video = {"type": "video", "video": [picture(20, 30, seed) for seed in range(4)]}
        with pytest.raises(RequestError, match="reads images and no videos"):
            llm.chat([{"role": "user", "content": [video]}], PARAMS, use_tqdm=False)
    assert first.prompt_token_ids == prepared.token_ids and prepared.token_ids.count(4) == 15 + 64
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    assert again.num_cached_tokens == len(prepared.token_ids) - 1
    logits = reference_logits(reference, prepared.token_ids + first.outputs[0].token_ids, prepared.media)
    assert logits[len(prepared.token_ids) - 1 : -1].argmax(-1).tolist() == first.outputs[0].token_ids
