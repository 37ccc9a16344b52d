"""Bugs to plant in each mechanism that keeps a request's bits independent of its company."""

from __future__ import annotations

from tests.mutation.mutant import mutant

MATRIX, GRID, REUSE, ROWS = (
    "tests/test_deterministic.py", "tests/scheduler/test_step_grid.py", "tests/cache/test_reuse_grid.py",
    "tests/ops/test_rows.py",
)  # fmt: skip
BITS = f"{MATRIX}::test_bits_do_not_depend_on_the_company"
OTHERS = f"{MATRIX}::test_other_layers_and_weights"

DETERMINISM = (
    mutant(
        "products-of-many-rows", "a row's product does not depend on other rows", "weft/ops/linear/__init__.py",
        'return by_row("x")(linear_reference, x.flatten(0, -2), weight, bias)',
        "return linear_reference(x.flatten(0, -2), weight, bias)", ROWS,
    ),
    mutant(
        "steps-off-the-grid", "a step of a prompt ends at a point of the grid", "weft/scheduler/step_grid.py",
        "min(start + num_tokens, prompt - 2) // self.size * self.size - start", "num_tokens", GRID,
    ),
    mutant(
        "a-token-is-left", "a step of a prompt has two tokens at least", "weft/scheduler/step_grid.py",
        "min(start + num_tokens, prompt - 2)", "min(start + num_tokens, prompt - 1)", GRID,
    ),
    mutant(
        "replays-at-once", "a resumed request feeds its generated tokens one by one", "weft/scheduler/step_grid.py",
        "            return min(num_tokens, 1)\n", "            return num_tokens\n", GRID,
    ),
    mutant(
        "steps-beyond-the-prompt", "no step goes beyond the prompt's end", "weft/scheduler/step_grid.py",
        "            return prompt - start\n", "            return num_tokens\n", GRID,
    ),
    mutant(
        "generated-is-reused", "what decodes computed is reused by nobody", "weft/cache/reuse_grid.py",
        "return num_tokens // self.size * self.size", "return num_tokens", REUSE,
    ),
    mutant(
        "resumed-reuses-answers", "a resumed request reuses its prompt alone", "weft/scheduler/lookups.py",
        "reuse=not wants_all, num_prompt_tokens=prompt", "reuse=not wants_all", GRID, MATRIX,
    ),
    mutant(
        "ends-are-moved", "a request's last state is no state of a prefill", "weft/cache/manager.py",
        "moves_state = moves_state and self._grid is None", "moves_state = moves_state", REUSE,
    ),
    mutant(
        "states-anywhere", "a prefill stores states at points of the grid", "weft/cache/state_plan.py",
        '"aligned" if grid is not None and policy == "exact" else policy', "policy", REUSE,
    ),
    mutant(
        "decodes-store-states", "a decode stores no state for others", "weft/cache/state_plan.py",
        'policy == "aligned" and grid is None', 'policy == "aligned"', REUSE,
    ),
    mutant(
        "attention-by-step", "attention of a token does not depend on its step", "weft/ops/attention/__init__.py",
        '"weft.ops.attention.paged", by_token)',
        '"weft.ops.attention.paged", lambda f, *args, **kwargs: f(*args, **kwargs))', ROWS, BITS,
    ),
    mutant(
        "classes-together", "a router's activation depends on no other row", "weft/ops/activation/__init__.py",
        'return (by_row("x") if backend is Backend.INVARIANT_TORCH else whole)(_gelu, x)', "return whole(_gelu, x)",
        f"{OTHERS}[ZayaForCausalLM]",
    ),
    mutant(
        "convolutions-of-heads-together", "the second convolution of a head depends on no other row",
        "weft/layers/convolutional_attention.py", "        if self._backend.is_invariant:\n", "        if False:\n",
        f"{OTHERS}[ZayaForCausalLM]",
    ),
    mutant(
        "gates-of-heads-together", "a head's gate depends on no other row", "weft/ops/activation/__init__.py",
        'rows = by_row("x", "gate") if backend is Backend.INVARIANT_TORCH else whole\n    return rows(_gate_heads,',
        "rows = whole\n    return rows(_gate_heads,", ROWS,
    ),
    mutant(
        "gates-together", "a gate's bits depend on no other row", "weft/ops/delta_rule/__init__.py",
        'by_row("a", "b"))', "lambda f, *args, **kwargs: f(*args, **kwargs))", BITS,
    ),
    mutant(
        "states-are-rounded", "states stay in float32", "weft/config/determinism.py",
        '        values["mamba_ssm_dtype"] = "float32"\n', "        pass\n", "tests/config/test_determinism.py",
    ),
    mutant(
        "drafts-as-prefills", "drafts never run as a prefill", "weft/config/fields.py",
        "return self.deterministic or (self", "return (self", "tests/config/test_determinism.py",
    ),
    mutant(
        "drafts-beside-prefills", "a step with a prefill verifies no drafts", "weft/scheduler/draft_steps.py",
        "len(decoding) == len(planned) and all", "all", GRID,
    ),
    mutant(
        "some-have-drafts", "all requests of a step verify equally many drafts", "weft/scheduler/draft_steps.py",
        "    if grid is not None and any(len(e.token_ids)", "    if False and any(len(e.token_ids)", GRID,
    ),
    mutant(
        "drafts-across-borders", "a verification has splits of one length", "weft/scheduler/step_grid.py",
        "not any(start - most < border <= start + most", "not any(False", GRID,
    ),
    mutant(
        "followers-across-borders", "a verification that follows another has splits of one length",
        "weft/scheduler/draft_steps.py", "    if grid is not None and not all(grid.may_verify(each.request)",
        "    if False and not all(grid.may_verify(each.request)", GRID,
    ),
    mutant(
        "verified-together", "sequences verify drafts one by one", "weft/ops/delta_rule/__init__.py",
        'by_sequence("projected", "state_slots", "slots")', "lambda f, *args, **kwargs: f(*args, **kwargs)",
        ROWS,
    ),
    mutant(
        "files-of-other-bits", "files of other engines are not reused", "weft/offload/fingerprint.py",
        "_origin_of_bits() if config.deterministic else None", "None", "tests/offload/test_fingerprint.py",
    ),
    mutant(
        "windows-by-step", "windows follow no step", "weft/ops/window_attention/__init__.py",
        'by_chunk("k", "v", "bias", "q", states=("k_window", "v_window"))',
        "lambda f, *args, **kwargs: f(*args, **kwargs)",
        OTHERS,
    ),
    mutant(
        "latents-by-step", "latent attention of a token does not depend on its step", "weft/ops/attention/__init__.py",
        '@with_kernel("weft.ops.attention.latent", by_token)',
        '@with_kernel("weft.ops.attention.latent", lambda f, *args, **kwargs: f(*args, **kwargs))', OTHERS,
    ),
    mutant(
        "heads-together", "queries are absorbed row by row", "weft/layers/latent_attention.py",
        "backend=self._backend if self._backend.is_invariant else Backend.TORCH", "backend=Backend.TORCH", OTHERS,
    ),
    mutant(
        "kda-together", "a row of Kimi Delta Attention does not depend on others", "weft/ops/delta_rule/__init__.py",
        'by_row("projected", "f", "gate", "state_slots")', "lambda f, *args, **kwargs: f(*args, **kwargs)",
        ROWS, OTHERS,
    ),
    mutant(
        "fp8-together", "a row's FP8 product does not depend on others", "weft/ops/linear/__init__.py",
        'return by_row("x")(_fp8_product, x, wide', "return _fp8_product(x, wide", OTHERS,
    ),
    mutant(
        "ranks-in-any-order", "a sum over ranks has one order", "weft/layers/all_reduce.py",
        "self._sum_in_order(x) if self._in_order else self._tp.all_reduce(x)", "self._tp.all_reduce(x)",
        "tests/layers/test_all_reduce.py",
    ),
    mutant(
        "images-together", "an image is encoded alone", "weft/runner/media_inputs.py",
        "self._one_by_one = config.deterministic", "self._one_by_one = False", f"{MATRIX}::test_images",
    ),
    mutant(
        "silent-operations", "an operation that states nothing refuses the mode", "weft/ops/backend.py",
        "            if fixed is None:\n", "            if False:\n", "tests/ops/test_backend.py",
    ),
    mutant(
        "chosen-rows-alone", "a prompt's last row sums as in its prompt", "weft/layers/attention.py",
        "        if self._backend.is_invariant:  # alone, these rows", "        if False:  # alone, these rows",
        "tests/layers/test_layers.py",
    ),
    mutant(
        "greedy-batches-alone", "all batches are sampled alike", "weft/layers/sampler.py",
        "        if self._backend.is_invariant:  # rows of any batch", "        if False:  # rows of any batch",
        "tests/layers/test_sampler.py",
    ),
    mutant(
        "decodes-as-prompts", "a token that decodes has the splits of its position", "weft/ops/attention/latent.py",
        "left_out=(splits, skips_begun)", "left_out=(False, skips_begun)", "tests/ops/delta_rule/test_kimi.py",
    ),
    mutant(
        "latent-splits-by-load", "splits follow from a token's position alone", "weft/ops/attention/latent.py",
        "        split, double_from = _FIXED_SPLIT, LONGER_SPLITS_FROM\n",
        "        split, double_from = 64 * num_seqs, LONGER_SPLITS_FROM\n", "tests/ops/delta_rule/test_kimi.py",
    ),
    mutant(
        "drafts-on-old-states", "a draft decodes on the state after the token before it", "weft/layers/recurrent.py",
        "            state[after] = state[before.long()]\n", "            pass\n",
        f"{MATRIX}::test_drafts_that_are_decoded_one_by_one",
    ),
    mutant(
        "decodes-by-load", "tiles and splits of a decode do not follow the load", "weft/ops/attention/paged.py",
        "    if fixed:\n", "    if False:\n", "tests/ops/attention/test_triton_attention.py",
    ),
    mutant(
        "experts-by-load", "FP8 experts have one tile", "weft/ops/moe/fp8_experts.py",
        'invariant={"config": _FIXED}', "invariant={}", "tests/ops/moe/test_triton_fp8_moe.py",
    ),
    mutant(
        "one-span", "a weight with few rows is cut into spans", "weft/ops/linear/invariant.py",
        "(blocks * splits < _ENOUGH_PROGRAMS or inner // splits > _LONGEST_SPAN)", "False",
        "tests/ops/linear/test_invariant.py",
    ),
)  # fmt: skip
