"""Bugs to plant in ZAYA1: convolutions before attention, the delay of values, the router's state, scaled residuals."""

from __future__ import annotations

from tests.mutation.mutant import mutant

LAYER, MODEL = "weft/layers/convolutional_attention.py", "weft/models/zaya.py"
PARITY = "tests/models/test_parity.py::test_prompts_of_all_lengths_and_forty_greedy_tokens[ZayaForCausalLM]"
CHUNKED = "tests/models/test_parity.py::test_chunked_prefill_mixed_batches_and_padding[ZayaForCausalLM]"
STATES = "tests/models/test_parity.py::test_states_stored_at_any_position_continue_the_sequence[ZayaForCausalLM]"
GEOMETRIES, SHARDS = "tests/models/test_parity.py::test_awkward_geometries", "tests/layers/test_tensor_parallel.py"
WAKING = "tests/layers/test_convolutional_attention.py"
SCALES = "tests/layers/test_residual_scale.py"

CONVOLUTIONAL_ATTENTION = (
    mutant(
        "copies-of-a-channel-in-step", "a copy reads one token further on than the copy before it", LAYER,
        "(tokens * size * width, size * width + 1, width, 1)", "(tokens * size * width, size * width, width, 1)",
        PARITY,
    ),
    mutant(
        "taps-end-early", "the last tap is at the token itself", LAYER, "width - (tokens + taps - 1))", "0)",
        GEOMETRIES,
    ),
    mutant(
        "values-without-delay", "half of the value channels come from the token before", LAYER,
        "rows[:, -1], rows[:, -2] = ~self.delayed, self.delayed", "rows[:, -1] = True", PARITY,
    ),
    mutant(
        "values-after-a-sleep", "constant taps come back with the weights", LAYER, "copies=piece.copies + always)",
        "copies=piece.copies)", WAKING,
    ),
    mutant(
        "no-bias-before-the-first-token", "the token before the first one has the projection's bias", LAYER,
        "if self.qkv_proj.bias is not None:", "if False:", GEOMETRIES,
    ),
    mutant(
        "state-of-convolutions-is-stale", "a chunk leaves its last inputs to the next one", LAYER,
        "taps.bias, state, silu=False", "taps.bias, state.clone(), silu=False", CHUNKED,
    ),
    mutant(
        "states-at-wrong-positions", "a state is stored where a chunk with a checkpoint ends",
        "weft/ops/convolution/__init__.py", "ends = chunks.start[ending] + chunks.length[ending]\n",
        "ends = chunks.start[ending] + chunks.length[ending] - 1\n", STATES,
    ),
    mutant(
        "heads-without-temperature", "every key head has a temperature", LAYER,
        "return self.qk_norm.of_queries(q), gate", "return q, gate", PARITY,
    ),
    mutant(
        "temperature-of-another-head", "query heads follow their key head in order", LAYER,
        "self.temp[:, None, None]", "self.temp.flip(0)[:, None, None]", PARITY,
    ),
    mutant(
        "keys-take-one-query", "a key takes the mean of its queries", LAYER, "mixed.mean(2)", "mixed[:, :, 0]", PARITY,
    ),
    mutant(
        "heads-of-rank-zero", "a rank has the convolutions of its own heads", LAYER,
        "first = [rows.runs[0].source + before for", "first = [before for", SHARDS,
    ),
    mutant(
        "router-forgets", "a router adds the state of the layer before", MODEL,
        "carried = None if self.carry is None else self.carry(state)", "carried = None", PARITY,
    ),
    mutant(
        "router-passes-on-a-copy-of-the-past", "a router passes on the sum", "weft/layers/mlp_router.py",
        "state = state + carried\n        hidden = self.router_norm(state)",
        "hidden = self.router_norm(state + carried)", PARITY,
    ),
    mutant(
        "choice-without-bias", "a bias affects the choice of experts", "weft/layers/moe.py",
        "SOFTMAX._replace(bias=self.correction_bias)", "SOFTMAX", PARITY,
    ),
    mutant(
        "kernel-adds-the-bias-to-logits", "a bias is added to probabilities", "weft/ops/moe/router.py",
        "choice = odds / tl.sum(odds, 0) + tl.load", "choice = wide + tl.load", "tests/ops/moe/test_triton_moe.py",
    ),
    mutant(
        "stream-rounded", "the residual stream stays in float32", "weft/layers/residual_scale.py",
        "residual + self.residual_bias, self", "(residual + self.residual_bias).to(x.dtype).float(), self", SCALES,
    ),
)  # fmt: skip
