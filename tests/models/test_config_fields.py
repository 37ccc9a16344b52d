"""Nothing in a config is silently ignored: with any field changed, Weft computes what transformers does, or refuses."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import Harness
from tests.models.test_parity import TOLERANCE, prompt, reference_logits
from tests.tiny import ARCHITECTURES, MAMBA_ARCHITECTURES, make_config, shared_model
from tests.whole import RUNS_LONG
from weft.errors import WeftError, WeightsError

TOKENS = prompt(26)
"""More than the shorter of both windows."""
MULTIMODAL = tuple(arch for arch in ARCHITECTURES if arch.endswith("ForConditionalGeneration"))
"""Families whose text model is that of another family."""
NOT_OF_A_FORWARD_PASS = frozenset(
    "initializer_range use_cache num_logits_to_keep attention_dropout hidden_dropout output_router_logits "
    "router_aux_loss_coef z_loss_coefficient rescale_prenorm_residual bos_token_id eos_token_id pad_token_id "
    "time_step_max time_step_floor time_step_init_scheme time_step_scale use_mamba_kernels use_mambapy "
    "use_associative_scan mamba_chunk_size chunk_size block_size router_jitter_noise num_nextn_predict_layers "
    "mtp_layers_block_type moe_shared_expert_overlap w_init_variance_scale num_mtp_layers chain_hidden_post_norm "
    "mtp_hidden_states_first mtp_local_layer_ids".split()
)
"""Fields of training and generation, of how (not what) transformers computes, and of heads that Weft does not run."""

OTHERS: dict[str, Any] = {
    "layer_types": lambda v: v[::-1],
    "layers_block_type": lambda v: v[::-1],
    "block_types": lambda v: v[::-1],
    "rope_parameters": lambda v: v | {"rope_theta": 77.0},
    "time_step_limit": lambda v: [0.2, 0.6],
    "time_step_rank": lambda v: 5,
    "mamba_dt_rank": lambda v: 5,
    "attn_layer_indices": lambda v: [0, 3],
    "position_embedding_type": lambda v: "rope",
    "hidden_act": lambda v: "gelu" if v != "gelu" else "silu",
    "mamba_hidden_act": lambda v: "gelu",
    "hidden_mamba_act": lambda v: "gelu",
    "mlp_hidden_act": lambda v: "silu",
    "mamba_ssm_cache_dtype": lambda v: "bfloat16",
    "sliding_window": lambda v: 16,
    "moe_latent_size": lambda v: 20,
    "num_hidden_layers": lambda v: v - 1,
    "attn_logit_softcapping": lambda v: 5.0,
    "final_logit_softcapping": lambda v: 5.0,
    "hidden_activation": lambda v: "silu",
    "mlp_layer_types": lambda v: v[::-1],
    "mlp_only_layers": lambda v: [0],
    "q_lora_rank": lambda v: 18,
    "full_attn_idxs": lambda v: [1],
    "output_gate_type": lambda v: "silu" if v != "silu" else "sigmoid",
    "ple_layer_ids": lambda v: [2],
    "local_layer_ids": lambda v: [0],
    "unpadded_vocab_size": lambda v: 200,
    "scoring_func": lambda v: "relu",
}


def changed(name: str, value: Any) -> Any:
    if name in OTHERS:
        return OTHERS[name](value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value if value else 1
    if isinstance(value, float):
        return 1.5 * value + 0.1
    if isinstance(value, list):
        return [1.5 * item for item in value]
    raise AssertionError(f"say in OTHERS to what {name}={value!r} is to be changed")


@cache
def fields(arch: str) -> list[str]:
    """The fields that the architecture's own configuration class declares."""
    own = {f.name for f in dataclasses.fields(make_config(arch))} & set(type(make_config(arch)).__annotations__)
    return sorted(own - NOT_OF_A_FORWARD_PASS)


def check_field(arch: str, name: str, value: Any, shapes: dict[str, Any], folder: Path) -> bool:
    """Check that Weft computes the same as transformers with the field changed. Returns False if either refuses."""
    try:
        model = shared_model(arch, **{name: value})
        resized = {n: p.shape for n, p in model.named_parameters()} != shapes
        expected = None if resized else reference_logits(model, TOKENS)
    except Exception:  # transformers itself refuses it, or cannot run it
        return False
    model.save_pretrained(folder, **({"save_original_format": False} if arch.startswith("Olmo") else {}))
    try:
        harness = Harness(folder)
    except WeightsError as error:
        if f"{name}=" in str(error):  # transformers ties nothing, and stores a head that differs
            return False
        raise AssertionError("the field is not read: the weights have other shapes") from error
    except WeftError:
        return False
    if expected is not None:
        with torch.no_grad():
            got = harness.run([(harness.sequence(TOKENS), len(TOKENS))])[0]
        if name == "unpadded_vocab_size":  # transformers drops the others
            assert got.shape[1] == 211 and (got[:, value:] == -torch.inf).all()
            got = got[:, :value]
        assert got.shape == expected.shape and (got - expected).abs().max() < TOLERANCE
    return True


FAMILIES = [*MAMBA_ARCHITECTURES, *(a for a in ARCHITECTURES if a not in MULTIMODAL)]


def chosen(arch: str) -> list[str]:
    """The fields to change: all fields. Where long tests do not run, only the last family with a field changes it."""
    after = {name for other in FAMILIES[FAMILIES.index(arch) + 1 :] for name in fields(other)}
    return [name for name in fields(arch) if RUNS_LONG or name not in after]


@pytest.mark.parametrize("arch", FAMILIES)
def test_every_field_counts_or_is_refused(arch: str, tmp_path: Path) -> None:
    """If a field changes the sizes of weights, a successful load shows that the field is read (``test_parity.py`` has
    odd sizes). Otherwise logits are compared."""
    config, taken, names = make_config(arch), [], chosen(arch)
    shapes = {name: parameter.shape for name, parameter in shared_model(arch).named_parameters()} if names else {}
    for name in names:
        value = changed(name, getattr(config, name))
        try:
            if check_field(arch, name, value, shapes, tmp_path / name):
                taken.append(name)
        except AssertionError as error:
            raise AssertionError(f"{arch}: {name} changed from {getattr(config, name)!r} to {value!r}") from error
    assert len(taken) >= 8 or not RUNS_LONG, taken
