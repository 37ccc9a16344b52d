"""Layers of GLM-5.3 that share the selection of an earlier indexer.

transformers 5.23 forgets a selection at the next layer of linear attention, and so refuses every published schedule
with shared layers. The reference here is its model with the selection handed on, which is what the config describes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import Harness
from tests.models.test_parity import GLM5_NEXT, assert_greedy, assert_logits, prompt
from tests.tiny import make_checkpoint, make_model

LINEAR, INDEXED = "linear_attention", "indexed_attention"
SCHEDULES: list[tuple[list[str], dict[str, Any]]] = [
    ([LINEAR, INDEXED, LINEAR, INDEXED, INDEXED], {"indexer_types": ["full", "full", "full", "shared", "shared"]}),
    ([INDEXED, LINEAR, INDEXED, INDEXED], {"indexer_types": ["full", "full", "shared", "full"]}),
]


def hand_on(model: Any) -> Any:
    """Make every indexer return its selection, and every layer return the latest one."""
    for layer in model.model.language_model.layers:
        layer.self_attn.next_skip_topk = True

        def forward(*args: Any, before: Any = layer.forward, prev_topk_indices: Any = None, **kwargs: Any) -> Any:
            hidden, selected = before(*args, prev_topk_indices=prev_topk_indices, **kwargs)
            return hidden, prev_topk_indices if selected is None else selected

        layer.forward = forward
    return model


@pytest.mark.parametrize(("types", "modes"), SCHEDULES)
def test_shared_selections(types: list[str], modes: dict[str, Any], tmp_path: Path) -> None:
    overrides: dict[str, Any] = {"layer_types": types, "num_hidden_layers": len(types), "mlp_layer_types": None} | modes
    harness = Harness(make_checkpoint(GLM5_NEXT, tmp_path, **overrides))
    reference = hand_on(make_model(GLM5_NEXT, **overrides))
    sequences = [harness.sequence(prompt(n)) for n in (130, 65)]
    logits = harness.run([(s, len(s.tokens)) for s in sequences], pad_tokens=2, pad_seqs=1)
    for sequence, got in zip(sequences, logits, strict=True):
        assert_logits(got, reference, sequence.tokens)
    harness.decode(sequences, logits, 6)
    for sequence, n in zip(sequences, (130, 65), strict=True):
        assert_greedy(reference, sequence.tokens, n)
    shared = sum(kind == INDEXED and mode == "shared" for kind, mode in zip(types, modes["indexer_types"], strict=True))
    with_keys = [name for name, cache in harness.caches.items() if "index_keys" in cache]
    assert len(with_keys) == types.count(INDEXED) - shared
    assert sum("latent" in cache for cache in harness.caches.values()) == types.count(INDEXED)


def test_transformers_still_refuses_them() -> None:
    """When transformers hands selections on, this test fails, and ``hand_on`` can go."""
    types, modes = SCHEDULES[0]
    overrides: dict[str, Any] = {"layer_types": types, "num_hidden_layers": len(types), "mlp_layer_types": None} | modes
    with pytest.raises(ValueError, match="Shared DSA layers"), torch.no_grad():
        make_model(GLM5_NEXT, **overrides)(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
