"""Bugs to plant in Inkling 2: residuals over blocks, dynamic convolutions, clips, sinks by token, capped experts."""

from __future__ import annotations

from tests.mutation.mutant import mutant

LAYER, CONV = "weft/layers/clipped_attention.py", "weft/layers/dynamic_conv.py"
MODEL, READ = "weft/models/inkling2.py", "weft/ops/block_residual/__init__.py"
PARITY = "tests/models/test_parity.py::test_prompts_of_all_lengths_and_forty_greedy_tokens[Inkling2ForCausalLM]"
CHUNKED = "tests/models/test_parity.py::test_chunked_prefill_mixed_batches_and_padding[Inkling2ForCausalLM]"
GEOMETRIES, SHARDS = "tests/models/test_parity.py::test_awkward_geometries", "tests/layers/test_tensor_parallel.py"
CONFIG = "tests/config/test_inkling2.py"
WINDOWS, PAGES = "tests/ops/window_attention", "tests/ops/attention/test_triton_attention.py"
EXPERTS, FP8 = "tests/ops/moe/test_triton_moe.py", "tests/ops/moe/test_triton_fp8_moe.py"

BLOCK_RESIDUALS = (
    mutant(
        "blocks-begin-late", "a block begins at a multiple of its size", MODEL,
        "self._begins_block = index % size == 0", "self._begins_block = index % size == 1 or index == 0", PARITY,
    ),
    mutant(
        "stream-goes-on", "the first layer of a block begins a new stream", MODEL,
        "        else:\n            stream = stream + x\n", "        stream = stream + x\n", PARITY,
    ),
    mutant(
        "experts-read-too-little", "the experts of a block's first layer read the state before it", MODEL,
        "self.mlp_norm(residual, stream)[0]", "self.mlp_norm(residual[:, :1], stream)[0]", PARITY,
    ),
    mutant(
        "layers-of-blocks-alike", "layers that read other numbers of blocks are other kinds", MODEL,
        "(*self.kind, self._begins_block, -(-index // size))", "(*self.kind, self._begins_block)",
        "tests/models/test_inkling2.py",
    ),
    mutant(
        "states-not-normalised", "every state is divided by its root mean square", READ,
        "states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + STATE_EPS)", "states = states * 1.0",
        PARITY,
    ),
    mutant(
        "scores-of-blocks-unscaled", "scores are divided by the root of the width", READ,
        "* states.shape[2] ** -0.5", "* 1.0", PARITY,
    ),
    mutant(
        "queries-of-the-layer-before", "the first query is that of the second layer", MODEL,
        'f"attn_queries.{i - 1}"', 'f"attn_queries.{len(layers) - 1 - i}"', PARITY,
    ),
    mutant(
        "kernel-forgets-the-maximum", "the online softmax scales what it added before",
        "weft/ops/block_residual/kernels.py", "acc * kept + state", "acc + state", "tests/ops/block_residual",
    ),
    mutant(
        "taps-of-another-delay", "delayed channels come in order", CONV, "rows[:, kernel - 2 - i] = 1.0",
        "rows[:, i] = 1.0", PARITY,
    ),
    mutant(
        "stale-delays", "a chunk leaves its last inputs to the next one", CONV,
        "self.delays, None, state, silu=False", "self.delays, None, state.clone(), silu=False", CHUNKED,
    ),
    mutant(
        "inputs-not-added", "the input is added to its convolution", CONV, ".sum(1) + inputs[:, 0])", ".sum(1))",
        PARITY,
    ),
    mutant(
        "outputs-not-scaled", "a convolution of an output is scaled", "weft/layers/residual_conv.py",
        "        self._taps *= self._scale\n", "", PARITY,
    ),
    mutant(
        "scaled-up-to-the-clip", "shorter vectors are left as they are", LAYER, ".clamp(max=1.0)", "", PARITY,
    ),
    mutant(
        "keys-without-clip", "keys are clipped", LAYER, "k = clip(k, self._geometry.head_clip)", "k = k * 1.0", PARITY,
    ),
    mutant(
        "values-without-norm", "values are normalised", LAYER,
        "v = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + self._eps)", "v = v * 1.0", PARITY,
    ),
    mutant(
        "windows-scaled-by-position", "scores of full attention alone grow with the position",
        "weft/config/inkling.py", "        extent=window,\n", "        extent=window,\n        log_floor=40,\n", CONFIG,
    ),
    mutant(
        "one-input-for-all", "keys have an input of their own", LAYER,
        "project(x) for project, x in zip(", "project(inputs[0]) for project, x in zip(", PARITY,
    ),
    mutant(
        "keys-of-rank-zero", "a rank has the keys of its own heads", LAYER,
        "RowRun(kv_heads.start * n, 0, len(kv_heads) * n)", "RowRun(0, 0, len(kv_heads) * n)", SHARDS,
    ),
    mutant(
        "sinks-of-the-first-token", "a row of a window has sinks of its own", "weft/ops/window_attention/kernels.py",
        "        places = row * FIXED.num_kv_heads * GROUP + heads\n", "        places = heads\n", WINDOWS,
    ),
    mutant(
        "sinks-of-a-prompt-begin-at-zero", "a prompt's tokens have sinks of their own",
        "weft/ops/attention/prefill.py", "places = (begin + tokens).to(tl.int64) * FIXED.num_heads + heads",
        "places = tokens.to(tl.int64) * FIXED.num_heads + heads", PAGES,
    ),
    mutant(
        "sinks-of-drafts", "verified tokens have sinks of their own", "weft/ops/attention/decode.py",
        "sink_places = (row + query_tokens).to(tl.int64)", "sink_places = (row + query_tokens * 0).to(tl.int64)", PAGES,
    ),
    mutant(
        "gate-not-capped", "the linear factor of the gate is capped", "weft/ops/triton/elementwise.py",
        "return capped_gate / (1.0", "return gate / (1.0", EXPERTS,
    ),
    mutant(
        "sigmoid-of-the-capped-gate", "the sigmoid reads the gate before its cap", "weft/ops/moe/__init__.py",
        "capped = (c * torch.tanh(y / c) for y, c in ((gate, gate_cap), (up, up_cap)))\n",
        "gate = gate_cap * torch.tanh(gate / gate_cap)\n"
        "    capped = (c * torch.tanh(y / c) for y, c in ((gate * 1.0, 1e9), (up, up_cap)))\n", EXPERTS,
    ),
    mutant(
        "fp8-pairs-without-activation", "FP8 experts of few tokens have the model's activation",
        "weft/ops/moe/fp8_experts.py", "pairs_product(x, up, hidden, ids, config.up, extras)",
        "pairs_product(x, up, hidden, ids, config.up, NO_EXTRAS)", FP8,
    ),
    mutant(
        "router-rounds", "the router computes in float32", "weft/layers/inkling_moe.py",
        "return F.linear(x.float(), self.weight)", "return F.linear(x, self.weight.to(x.dtype))",
        "tests/models/test_inkling2.py",
    ),
)  # fmt: skip
