"""Bugs to plant where layers verify drafts: in states after tokens, in gates, in hashes of n-grams, in who verifies."""

from __future__ import annotations

from tests.mutation.mutant import mutant

KIMI = "tests/ops/delta_rule/test_kimi.py::test_verify_step"
ALONE = [
    f"tests/ops/delta_rule/test_{name}.py::test_a_verified_token_leaves_the_state_of_a_decode_step"
    for name in ("kimi", "triton_gdn")
]
LATENTS = "tests/ops/delta_rule/test_kimi.py::test_latent_attention_of_a_verification"
GLUON = "tests/ops/delta_rule/test_gluon_verify.py"
CONV = "tests/ops/convolution/test_short_conv.py"
MODELS = "tests/models/test_verification.py"
NO_BIT = f"{MODELS}::test_rejected_drafts_leave_no_bit"
KERNEL, KDA = "weft/ops/delta_rule/verify.py", "weft/ops/delta_rule/few_tokens.py"

VERIFICATION = (
    mutant(
        "states-to-the-next-token", "the state after a token goes to its slot", "weft/ops/verification.py",
        "after = slots[:, i].long()", "after = slots[:, (i + 1) % query_len].long()", MODELS,
    ),
    mutant(
        "old-states-run-on", "a token begins from the state after the token before it", "weft/ops/verification.py",
        "token = (x.unflatten", "running, token = [state[read] for state in states], (x.unflatten", MODELS,
    ),
    mutant(
        "states-in-place", "the kernel leaves the state of a verification's start", KERNEL,
        "tl.store(state + after * HV * K * V + i", "tl.store(state + slot * HV * K * V + i", KIMI,
    ),
    mutant(
        "first-tokens-decay", "each token has decays of its own", KERNEL,
        "p_f, p_gate = f + i_token * stride_f,", "p_f, p_gate = f + i_seq * T * stride_f,", KIMI,
    ),
    mutant(
        "first-heads-decay", "each head has a rate of its own", KERNEL,
        "tl.load(A_log + tl.program_id(0))", "tl.load(A_log)", KIMI,
    ),
    mutant(
        "channels-of-the-first-head", "each head's channels decay by their own bias", KERNEL,
        "b_f = tl.load(dt_bias + channels,", "b_f = tl.load(dt_bias + channels % FIXED.head_k_dim,", KIMI,
    ),
    mutant(
        "one-decay-for-all-channels", "the rows of a state decay by channel", KERNEL,
        "FIXED.vectors.decays + o_k, mask=k_mask, other=0.0)",
        "FIXED.vectors.decays + 0 * o_k, mask=k_mask, other=0.0)",
        KIMI,
    ),
    mutant(
        "tokens-from-the-first-state", "a decoded draft continues the state of the token before it", KDA,
        "places = (slots[:, i - 1] if i else state_slots, slots[:, i])", "places = (state_slots, slots[:, i])",
        *ALONE,
    ),
    mutant(
        "outputs-by-token", "outputs of a sequence's drafts stand side by side", KDA,
        "g, shape, out[i::num_tokens], False", "g, shape, out[i * num_seqs : (i + 1) * num_seqs], False", ALONE[0],
    ),
    mutant(
        "inputs-of-the-first-token", "each decoded draft has inputs of its own", KDA,
        "inputs.every(i, num_tokens)", "inputs.every(0, num_tokens)", *ALONE,
    ),
    mutant(
        "padding-runs", "a padding sequence leaves its outputs zero", "weft/ops/verification.py",
        " * (state_slots > 0)\n", "\n", *ALONE, MODELS, CONV,
    ),
    mutant(
        "gates-without-a-floor", "log decays have the floor of Ling 3.0", KDA,
        "inputs, g = Inputs(projected, f, gate, geometry.gate_floor), as_delta_net(geometry)",
        "inputs, g = Inputs(projected, f, gate), as_delta_net(geometry)", KIMI,
    ),
    mutant(
        "last-inputs-everywhere", "a convolution's state after a token holds no later input", KERNEL,
        "q_kept, k_kept, v_kept = states[t]", "q_kept, k_kept, v_kept = states[T - 1]", KIMI,
    ),
    mutant(
        "gluon-decays-of-the-first-token", "states in a launch of their own decay by token",
        "weft/ops/delta_rule/verify_gluon.py", "decays = gl.load(p_token + FIXED", "decays = gl.load(p_vectors + FIXED",
        GLUON,
    ),
    mutant(
        "inputs-of-a-rejected-token", "a rejected token leaves no input in a convolution's state",
        "weft/ops/convolution/decode.py", "after = tl.load(slots + i_seq * T + t)",
        "after = tl.load(slots + i_seq * T + (t + 1) % T)", CONV,
    ),
    mutant(
        "inputs-that-nobody-keeps", "slot 0 keeps nothing", "weft/ops/convolution/decode.py",
        "mask & (after > 0), W)", "mask & (after >= 0), W)", CONV,
    ),
    mutant(
        "convolutions-from-kept-states", "a verification of a convolution begins at the sequence's slot",
        "weft/layers/short_conv.py", "causal_conv1d_verify(x, *conv, slots, after,",
        "causal_conv1d_verify(x, *conv, after[:, 0].contiguous(), after,", MODELS,
    ),
    mutant(
        "hashes-off-by-one", "n-grams hash the ids before a token", "weft/ops/ngram/__init__.py",
        "    page_size = cache.shape[1]\n", "    page_size, cache = cache.shape[1], cache.roll(1, 1)\n", MODELS,
    ),
    mutant(
        "hashes-of-the-step-before", "a step's ids are stored before they are hashed", "weft/ops/ngram/__init__.py",
        "    cache.flatten(0, 1).index_copy_(0,",
        "    cache, stored = cache.clone(), cache\n    stored.flatten(0, 1).index_copy_(0,",
        MODELS,
    ),
    mutant(
        "latents-of-later-tokens", "a verified token sees no later token", "weft/ops/attention/latent.py",
        "(batch.seq_lens[:, None] - earlier).flatten()", "(batch.seq_lens[:, None] - 0 * earlier).flatten()", LATENTS,
    ),
    mutant(
        "ngrams-as-prefills", "drafts of Qwen4-Exp are verified", "weft/config/ngram.py",
        "            verifies=True,\n", "", NO_BIT,
    ),
    mutant(
        "kda-as-prefills", "drafts of Kimi-Linear are verified", "weft/config/kimi.py",
        "            verifies=True,\n", "", NO_BIT,
    ),
)  # fmt: skip
