"""Images as a setting, and the vision tower in ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import model_context
from tests.media import GLM, HYBRID, INDEXED, INKLING, INKLING2, VL, VL_MOE, overrides
from tests.tiny import make_config
from weft.cli.config import capacity
from weft.config import resolve, vision_settings
from weft.config.checkpoint import read_checkpoint_config
from weft.config.fields import EngineConfig
from weft.config.indexed_attention import PLACES_LAYER
from weft.config.layer_spec import CacheDtypes, CacheTensor
from weft.config.media_limits import MediaLimits
from weft.errors import ConfigError, UnsupportedModelError
from weft.models.registry import create_model


def write(folder: Path, arch: str, vision: dict[str, Any] | None = None, **top: Any) -> Path:
    keys = {key: value for key, value in overrides(arch).items() if key != "silent"}
    config = json.loads(make_config(arch, **keys).to_json_string()) | {"architectures": [arch]} | top
    config["vision_config"] |= vision or {}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def settings(folder: Path, **given: Any) -> EngineConfig:
    return resolve(model=str(folder), load_format="dummy", skip_tokenizer_init=True, device="cpu", **given)


@pytest.mark.parametrize("arch", [VL, VL_MOE, HYBRID, INDEXED])
def test_the_tower_of_a_checkpoint(arch: str, tmp_path: Path) -> None:
    config = read_checkpoint_config(write(tmp_path, arch))
    assert config.vision is not None and not config.runs_vision
    vision = config.vision
    assert (vision.depth, vision.hidden_size, vision.num_heads, vision.patch_dim) == (3, 24, 2, 96)
    assert (vision.tokens.image, vision.tokens.video, vision.tokens.start, vision.tokens.end) == (200, 201, 202, 203)
    assert vision.deepstack_indexes == ((0, 2) if "VL" in arch else ())
    assert vision.mrope_section == ((4, 2, 2) if "VL" in arch else (2, 1, 1))
    assert config.with_vision().runs_vision


def test_positions_are_stored_once_and_only_with_images(tmp_path: Path) -> None:
    """By models whose indexers rotate pools; in float32, since bfloat16 has no 257."""
    folder = write(tmp_path, INDEXED)
    dtypes = CacheDtypes(model="bfloat16")
    with_images = settings(folder).model_config.layer_specs(dtypes)
    assert with_images.pop(PLACES_LAYER).paged == (CacheTensor("places", (3,), "float32"),)
    assert with_images == settings(folder, language_model_only=True).model_config.layer_specs(dtypes)
    assert PLACES_LAYER not in read_checkpoint_config(write(tmp_path, HYBRID)).with_vision().layer_specs(dtypes)


def test_the_tower_of_glm(tmp_path: Path) -> None:
    """Defaults are those of transformers; every key that it reads is read."""
    import transformers

    reference: Any = transformers.Glm5NextConfig()
    text = json.loads(reference.to_json_string())["text_config"]
    top = {"architectures": [GLM], "text_config": text}
    for given in ({}, json.loads(reference.vision_config.to_json_string())):
        (tmp_path / "config.json").write_text(json.dumps(top | {"vision_config": given}))
        vision = read_checkpoint_config(tmp_path).vision
        assert vision is not None and vision.glm is not None and vision.mrope_section is None
        theirs = reference.vision_config
        for key in ("depth", "hidden_size", "intermediate_size", "num_heads", "patch_size", "temporal_patch_size",
                    "spatial_merge_size", "out_hidden_size", "in_channels"):  # fmt: skip
            assert getattr(vision, key) == getattr(theirs, key), key
        assert vision.rope_theta == theirs.rope_parameters["rope_theta"] and vision.activation == theirs.hidden_act
        assert vision.glm.merger_size == theirs.projection_intermediate_size and vision.glm.bias
        assert (vision.glm.norm_eps, vision.glm.swiglu_limit) == (theirs.rms_norm_eps, theirs.swiglu_limit)
        tokens = vision.tokens
        assert (tokens.image, tokens.video) == (reference.image_token_id, reference.video_token_id)
        assert (tokens.start, tokens.end) == (reference.image_start_token_id, reference.image_end_token_id)
    (tmp_path / "config.json").write_text(json.dumps(top))
    assert read_checkpoint_config(tmp_path).vision is None


def test_keys_of_glms_tower(tmp_path: Path) -> None:
    changes = {"attention_bias": False, "rope_parameters": {"rope_type": "axial", "rope_theta": 500.0}}
    vision = read_checkpoint_config(write(tmp_path, GLM, changes)).vision
    assert vision is not None and vision.glm is not None
    assert (vision.tokens.image, vision.tokens.video, vision.tokens.start, vision.tokens.end) == (200, 201, 202, 203)
    assert vision.rope_theta == 500.0 and not vision.glm.bias and vision.glm.merger_size == 56
    assert (vision.glm.norm_eps, vision.glm.swiglu_limit) == (1e-3, 0.5)


@pytest.mark.parametrize(
    ("vision", "error", "words"),
    [
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act='gelu' is not supported; supported is 'silu'"),
        ({"temporal_patch_size": 1}, UnsupportedModelError, "temporal_patch_size=1 is not supported; supported is 2"),
        ({"head_dim": 8}, UnsupportedModelError, "head_dim=8 is not supported; supported is .* = 12"),
        ({"rope_parameters": {"rope_type": "linear"}}, UnsupportedModelError, "rope_type='linear' is not supported"),
        ({"hidden_size": 20}, ConfigError, "hidden_size=20 .* of a multiple of 4 dimensions"),
        ({"patch_size": [4, 8]}, UnsupportedModelError, r"patch_size=\[4, 8\] is not supported; give one number"),
        ({"swiglu_limit": 0}, ConfigError, "swiglu_limit=0 is not valid; expected a number above 0"),
    ],
)
def test_refused_towers_of_glm(vision: dict[str, Any], error: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        read_checkpoint_config(write(tmp_path, GLM, vision))


def test_the_tower_of_inkling_2(tmp_path: Path) -> None:
    """Defaults are those of transformers; every key that it reads is read."""
    import transformers

    reference: Any = transformers.Inkling2Config()
    text = json.loads(reference.to_json_string())["text_config"]
    top = {"architectures": [INKLING2], "text_config": text, "transformers_version": "5.23.0"}
    names = {"depth": "num_hidden_layers", "num_heads": "num_attention_heads", "in_channels": "num_channels",
             "out_hidden_size": "text_hidden_size"}  # fmt: skip
    theirs = reference.vision_config
    for given in ({}, json.loads(theirs.to_json_string())):
        (tmp_path / "config.json").write_text(json.dumps(top | {"vision_config": given}))
        vision = read_checkpoint_config(tmp_path).vision
        assert vision is not None and vision.inkling2 is not None and vision.mrope_section is None
        for key in ("depth", "hidden_size", "intermediate_size", "num_heads", "patch_size", "spatial_merge_size",
                    "out_hidden_size", "in_channels"):  # fmt: skip
            assert getattr(vision, key) == getattr(theirs, names.get(key, key)), key
        assert vision.rope_theta == theirs.rope_parameters["rope_theta"] and vision.activation == theirs.hidden_act
        assert vision.num_position_embeddings == theirs.posemb_grid_size**2 and vision.temporal_patch_size == 1
        own = vision.inkling2
        assert (own.projector_size, own.projector_bias) == (theirs.projection_hidden_dim, theirs.projector_bias)
        assert own.norm_eps == theirs.layer_norm_eps
        assert (vision.tokens.image, vision.tokens.video) == (reference.image_token_id, None)
    (tmp_path / "config.json").write_text(json.dumps(top))
    assert read_checkpoint_config(tmp_path).vision is None


def test_keys_of_inkling_2s_tower(tmp_path: Path) -> None:
    """Also under the names of published files; the width of MLPs follows from a ratio if it is not given."""
    changes = {"native_patch_size": 6, "adapter_merge_size": 3, "intermediate_size": None, "mlp_ratio": 2.5,
               "patch_size": None, "spatial_merge_size": None}  # fmt: skip
    vision = read_checkpoint_config(write(tmp_path, INKLING2, changes)).vision
    assert vision is not None and vision.inkling2 is not None and vision.tokens.image == 200
    assert (vision.patch_size, vision.spatial_merge_size, vision.intermediate_size) == (6, 3, 60)
    assert (vision.num_class_rows, vision.rope_theta, vision.num_position_embeddings) == (9, 100.0, 25)
    own = vision.inkling2
    assert (own.projector_size, own.projector_bias, own.norm_eps) == (56, True, 1e-3)


@pytest.mark.parametrize(
    ("vision", "error", "words"),
    [
        ({"hidden_act": "relu"}, UnsupportedModelError, "hidden_act='relu' is not supported; supported are gelu"),
        ({"num_channels": 4}, UnsupportedModelError, "in_channels=4 is not supported; supported is 3"),
        ({"head_dim": 8}, UnsupportedModelError, "head_dim=8 is not supported; supported is .* = 12"),
        ({"rope_parameters": {"rope_type": "yarn"}}, UnsupportedModelError, "rope_type='yarn' is not supported"),
        ({"hidden_size": 20}, ConfigError, "hidden_size=20 .* of a multiple of 4 dimensions"),
    ],
)
def test_refused_towers_of_inkling_2(
    vision: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        read_checkpoint_config(write(tmp_path, INKLING2, vision))


@pytest.mark.parametrize("side", [4, 6, 20, 40])
def test_layers_of_inklings_tower(side: int, tmp_path: Path) -> None:
    """Layers must match transformers' plan, with fewer layers than sizes of cells and with more."""
    from transformers.models.inkling.modeling_inkling import plan_out_scales

    for depth in (1, 2, 3, 4, 5, 6, 9, 24):
        given = {"patch_size": side, "n_layers": depth, "text_hidden_size": 1}
        vision = read_checkpoint_config(write(tmp_path, INKLING, given)).vision
        assert vision is not None and vision.inkling is not None and vision.out_hidden_size == 48
        cells = [[1, 1, 3]]
        for fold in vision.inkling.folds:
            assert fold.in_channels == cells[-1][2]
            cells.append([cells[-1][0] * fold.frames, cells[-1][1] * fold.side, fold.out_channels])
        wanted = [[t, h, channels] for t, h, _, channels in plan_out_scales(2, side, depth, 3).tolist()]
        assert cells == [*wanted[:-1], [2, side, 48]]
        assert (vision.depth, vision.merge_unit, vision.num_class_rows, vision.patch_dim) == (depth, 1, 0, 6 * side**2)


def test_the_tower_of_inkling(tmp_path: Path) -> None:
    """Defaults are those of transformers."""
    import transformers

    reference: Any = transformers.InklingConfig()
    text = json.loads(reference.to_json_string())["text_config"]
    top = {"architectures": [INKLING], "text_config": text}
    theirs, found = reference.vision_config, []
    for given in ({}, json.loads(theirs.to_json_string())):
        (tmp_path / "config.json").write_text(json.dumps(top | {"vision_config": given}))
        vision = read_checkpoint_config(tmp_path).vision
        assert vision is not None and vision.inkling is not None and vision.mrope_section is None
        assert (vision.depth, vision.patch_size) == (theirs.num_hidden_layers, theirs.patch_size)
        assert (vision.tokens.image, vision.tokens.video) == (reference.image_token_id, None)
        found.append(vision)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("key", "value"),
    [("n_channels", 1), ("temporal_patch_size", 4), ("vision_encoder_type", "vit"), ("use_vision_norm", False)],
)
def test_refused_towers_of_inkling(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r" is not supported; supported is "):
        read_checkpoint_config(write(tmp_path, INKLING, {key: value}))


@pytest.mark.parametrize("arch", [VL, HYBRID, GLM, INKLING2, INKLING])
def test_weights_of_a_tower(arch: str, tmp_path: Path) -> None:
    """``num_weights`` counts the weights of all matrices of a tower that was built."""
    config = read_checkpoint_config(write(tmp_path, arch))
    vision, model = config.vision, create_model(config.with_vision(), model_context())
    matrices = [p.numel() for name, p in model.named_parameters() if ".visual." in name and p.dim() > 1]
    assert vision is not None and vision.num_weights == sum(matrices)


def test_old_and_new_spellings(tmp_path: Path) -> None:
    given = {"num_hidden_layers": 3, "num_attention_heads": 2, "depth": None, "num_heads": None, "patch_size": [4, 4]}
    folder = write(tmp_path, VL, given)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rope_scaling"] = config["text_config"].pop("rope_parameters") | {"rope_type": "default"}
    config["text_config"]["rope_theta"] = 5e6
    del config["text_config"]["rope_scaling"]["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))
    vision = read_checkpoint_config(folder).vision
    assert vision is not None
    assert (vision.depth, vision.num_heads, vision.patch_size, vision.mrope_section) == (3, 2, 4, (4, 2, 2))


@pytest.mark.parametrize(
    ("vision", "error", "words"),
    [
        ({"hidden_act": "relu"}, UnsupportedModelError, "hidden_act='relu' is not supported; supported are gelu"),
        ({"num_position_embeddings": 24}, ConfigError, "num_position_embeddings=24 .* a square number"),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            UnsupportedModelError,
            "rope_type='yarn' is not supported; a tower is rotated by rows and columns",
        ),
        ({"hidden_size": 20}, ConfigError, "hidden_size=20 .* of a multiple of 4 dimensions"),
        ({"deepstack_visual_indexes": [2, 3]}, ConfigError, "ascending numbers of blocks below depth"),
        ({"patch_size": [4, 8]}, UnsupportedModelError, r"patch_size=\[4, 8\] is not supported; give one number"),
    ],
)
def test_refused_towers(vision: dict[str, Any], error: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        read_checkpoint_config(write(tmp_path, VL, vision))


def test_sections_that_are_not_interleaved_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, VL)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rope_parameters"]["mrope_interleaved"] = False
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="mrope_interleaved=false is not supported"):
        read_checkpoint_config(folder)


def test_a_tower_runs_where_there_is_one(tmp_path: Path) -> None:
    folder = write(tmp_path, VL)
    config = settings(folder, max_model_len=500)
    assert config.model_config.runs_vision and config.language_model_only is False
    assert (config.max_num_encoder_input_tokens, config.encoder_cache_size) == (500, 32768)
    alone = settings(folder, language_model_only=True)
    assert not alone.model_config.runs_vision and alone.encoder_cache_size is None
    for given in ({"tensor_parallel_size": 2}, {"speculative_config": {"method": "ngram"}}):
        assert settings(folder, **given).model_config.runs_vision


def test_what_images_cost_is_shown(tmp_path: Path) -> None:
    """The tower whole on every rank, the rest of the weights shared; the rows of the encoder cache."""
    folder = write(tmp_path, VL)
    one, two = (capacity(settings(folder, encoder_cache_size=600, max_model_len=500, tensor_parallel_size=ranks))
                for ranks in (1, 2))  # fmt: skip
    tower = one["vision_tower_bytes"]
    assert tower > 3 * 4 * (4 * 24**2 + 2 * 24 * 40) and one["encoder_cache_bytes"] == 600 * 3 * 48 * 4
    assert two["weight_bytes"] == (one["weight_bytes"] - tower) // 2 + tower and two["vision_tower_bytes"] == tower
    text = capacity(settings(folder, language_model_only=True))
    assert text["weight_bytes"] == one["weight_bytes"] - tower and "vision_tower_bytes" not in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"encoder_cache_size": 8, "max_num_encoder_input_tokens": 9}, "must fit into the cache"),
        ({"encoder_cache_size": 8, "language_model_only": True}, "no effect without a vision tower"),
        ({"encoder_cuda_graph_patches": [64]}, "no effect with cuda_graph_mode='NONE'"),
        ({"encoder_cuda_graph_patches": [64], "language_model_only": True}, "no effect without a vision tower"),
        ({"encoder_cuda_graph_patches": [64, 6], "cuda_graph_mode": "FULL"}, "6 is not a multiple of 4 from 4 to 2048"),
        ({"encoder_cuda_graph_patches": [0, 64], "cuda_graph_mode": "FULL"}, "0 is not a multiple .* 0 alone for no"),
        ({"limit_mm_per_prompt": {"sound": 1}}, "unknown modality 'sound'"),
        ({"limit_mm_per_prompt": '{"image": -1}'}, "image=-1 is not a number of items"),
        ({"limit_mm_per_prompt": "image=3"}, "is not JSON"),
    ],
)
def test_contradictions(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(write(tmp_path, VL), **given)


def test_limits_and_sizes(tmp_path: Path) -> None:
    config = settings(write(tmp_path, VL), limit_mm_per_prompt='{"image": 4}', encoder_cache_size=64)
    assert config.limit_mm_per_prompt == MediaLimits(image=4) and config.max_num_encoder_input_tokens == 64


def test_captured_sizes_of_the_tower(tmp_path: Path) -> None:
    folder, name = write(tmp_path, VL), "encoder_cuda_graph_patches"
    assert settings(folder).encoder_cuda_graph_patches == ()
    for given, want in ((None, (64, 256)), ([0], ()), ([12, 8], (8, 12))):
        config = settings(folder, cuda_graph_mode="FULL", encoder_cuda_graph_patches=given)
        assert config.encoder_cuda_graph_patches == want and (given == [12, 8] or config.reasons[name])
    assert settings(folder, cuda_graph_mode="FULL", max_num_encoder_input_tokens=9).encoder_cuda_graph_patches == (36,)


def test_a_tower_that_does_not_fit_the_decoder(tmp_path: Path) -> None:
    folder = write(tmp_path, VL, {"out_hidden_size": 40})
    with pytest.raises(ConfigError, match=r"out_hidden_size=40 is not the decoder's hidden_size=48; .*language_model_"):
        settings(folder)
    assert settings(folder, language_model_only=True).language_model_only


def test_without_pillow_the_text_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A published Qwen3.5 is multimodal: whoever only wants its text need install nothing."""
    monkeypatch.setattr(vision_settings, "find_spec", lambda name: None)
    folder = write(tmp_path, VL)
    config = settings(folder)
    assert config.language_model_only and "images need Pillow" in config.reasons["language_model_only"]
    with pytest.raises(ConfigError, match="language_model_only=False: images need Pillow"):
        settings(folder, language_model_only=False)
