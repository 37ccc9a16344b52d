"""The x-matrix of INT4 and MXFP8 weights: a sample of every graph mode, every checkpoint policy, and two ranks.

Greedy tokens are those of transformers' model with the same weights dequantised: nothing is rounded at run time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.coded_checkpoints import make_coded_checkpoint
from tests.quantization.test_coded_parity import reference
from tests.ranks import fork_ranks
from tests.whole import unless_long
from tests.x_matrix import CAPTURED, Poisoned, Reference, check, open_engine

NEXT = "Qwen3NextForCausalLM"
KINDS = {"int4": "int4 g32", "mxfp8": "fp8 mx"}
COLUMNS = [
    ("int4", "NONE", "in turn", "exact", 1),
    ("int4", "FULL_DECODE_ONLY", "overlap", "aligned", 1),
    ("int4", "FULL_AND_PIECEWISE", "overlap", "exact", 1),
    ("int4", "FULL", "overlap", "finish_only", 1),
    ("int4", "FULL", "overlap", "exact", 2),
    ("mxfp8", "FULL_AND_PIECEWISE", "overlap", "exact", 1),
    ("mxfp8", "FULL", "overlap", "exact", 2),
]
"""Form, graph mode, overlap, checkpoint policy, ranks."""
SOME = [COLUMNS[1]]
RUN = unless_long(SOME, COLUMNS)
"""Columns that run. ``make test`` leaves the others to ``make test-all``."""
CASES = [("cold", "mixed", 210), ("hit", "prefill", 129), ("branch hit", "decode", 65), ("preempted", "mixed", 63)]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """Two ranks get whole groups of 32."""
    more = {"num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    found = {}
    for form in sorted({form for form, *_ in RUN}):
        folder = tmp_path_factory.mktemp("tiny")
        coded = make_coded_checkpoint(NEXT, KINDS[form], folder, max_position_embeddings=1100, **more)
        found[form] = Reference(reference(NEXT, folder / "plain"), coded)
    return found


@pytest.fixture(scope="module", params=RUN, ids=lambda p: "-".join(map(str, p)))
def engine(request: pytest.FixtureRequest, references: dict[str, Reference]) -> Iterator[Poisoned]:
    form, mode, overlap, policy, ranks = request.param
    settings: dict[str, Any] = (
        {"piecewise_cuda_graph_tokens": CAPTURED} if mode in ("FULL", "FULL_AND_PIECEWISE") else {}
    )
    settings |= {"state_checkpoint_policy": policy, "tensor_parallel_size": ranks}
    with ExitStack() as stack:
        if ranks > 1:
            stack.enter_context(fork_ranks(poisoned=True))
        engine = stack.enter_context(open_engine(form, mode, overlap, "capture", references, **settings))
        engine.policy = policy
        yield engine


@pytest.mark.parametrize(("path", "phase", "length"), CASES)
def test_tokens_are_those_of_the_reference(engine: Poisoned, path: str, phase: str, length: int) -> None:
    check(engine, path, phase, length)
