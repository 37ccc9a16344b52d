"""Shares of a dimension: even, or refused; few heads are replicated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.published import read, tiny
from weft.config.parallelism import check_shares
from weft.config.sharding import divide, head_range
from weft.errors import ConfigError
from weft.parallel.tensor_parallel import SingleRank


def test_divide() -> None:
    assert divide(12, 4, "heads") == 3
    with pytest.raises(ConfigError, match=r"heads=10 is not divisible by tensor_parallel_size=4; choose"):
        divide(10, 4, "heads")


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_head_ranges_partition_the_heads(size: int) -> None:
    assert [h for rank in range(size) for h in head_range(6, rank, size, "heads")] == list(range(6))


@pytest.mark.parametrize(("heads", "size"), [(1, 2), (2, 4), (2, 8), (3, 6)])
def test_few_heads_are_replicated_over_neighbouring_ranks(heads: int, size: int) -> None:
    owners = [list(head_range(heads, rank, size, "heads")) for rank in range(size)]
    assert owners == [[rank * heads // size] for rank in range(size)]


def test_heads_that_can_be_neither_split_nor_replicated() -> None:
    with pytest.raises(ConfigError, match=r"heads=4 is not divisible by tensor_parallel_size=3"):
        head_range(4, 0, 3, "heads")
    with pytest.raises(ConfigError, match=r"heads=2 cannot be replicated evenly over tensor_parallel_size=3"):
        head_range(2, 0, 3, "heads")


@pytest.mark.parametrize(
    ("arch", "changes", "size", "message"),
    [
        ("LlamaForCausalLM", {"num_attention_heads": 6, "num_key_value_heads": 6}, 4, "num_attention_heads=6"),
        (
            "LlamaForCausalLM",
            {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 63},
            9,
            None,
        ),  # three ranks have each
        ("LlamaForCausalLM", {"intermediate_size": 57}, 2, "intermediate_size=57"),
        ("Qwen2MoeForCausalLM", {"intermediate_size": 57}, 2, "intermediate_size=57"),  # of layer 1, which is dense
        ("Qwen2MoeForCausalLM", {"intermediate_size": 57, "mlp_only_layers": []}, 2, None),
        ("Qwen2MoeForCausalLM", {"moe_intermediate_size": 25}, 2, "moe_intermediate_size=25"),
        ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 41}, 2, "shared_expert_intermediate_size=41"),
        ("Qwen3NextForCausalLM", {"linear_num_key_heads": 1}, 2, "linear_num_key_heads=1"),
        ("KimiLinearForCausalLM", {"linear_num_heads": 3}, 2, r"linear_attn_config\.num_heads=3"),
        ("KimiLinearForCausalLM", {"num_attention_heads": 5, "num_key_value_heads": 5}, 2, "num_attention_heads=5"),
        ("MiniMaxForCausalLM", {"layer_types": ["linear_attention"] * 4}, 8, "num_attention_heads=4"),
        ("Lfm2ForCausalLM", {"layer_types": ["conv"] * 4, "hidden_size": 51}, 2, "hidden_size=51"),
        ("Mamba2ForCausalLM", {"n_groups": 1}, 2, "mamba groups=1"),
        ("Mamba2ForCausalLM", {}, 4, "mamba heads=6"),
        ("FalconMambaForCausalLM", {}, 5, r"mamba channels .*=96"),
        ("Gemma3ForCausalLM", {}, 8, "num_attention_heads=4"),
    ],
)
def test_models_that_ranks_share(
    arch: str, changes: dict[str, Any], size: int, message: str | None, tmp_path: Path
) -> None:
    """A size that does not divide is named when the config is resolved, before ranks are started."""
    config = read(tmp_path, tiny(arch, **changes))
    if message is None:
        check_shares(config, size, expert_parallel=False)
        return
    with pytest.raises(ConfigError, match=f"{message} is not divisible by tensor_parallel_size={size}"):
        check_shares(config, size, expert_parallel=False)


def test_whole_experts_that_ranks_share(tmp_path: Path) -> None:
    config = read(tmp_path, tiny("Qwen3MoeForCausalLM", moe_intermediate_size=25, intermediate_size=57))
    check_shares(config, 1, expert_parallel=True)
    with pytest.raises(ConfigError, match="num_experts=5 is not divisible by tensor_parallel_size=2"):
        check_shares(config, 2, expert_parallel=True)


def test_the_group_of_one_does_nothing() -> None:
    x = torch.ones(3)
    tp = SingleRank()
    assert (tp.rank, tp.size) == (0, 1)
    assert tp.all_reduce(x) is x and tp.all_gather(x) is x
