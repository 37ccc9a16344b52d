"""Every architecture computes the function of its transformers implementation: float32 logits and greedy tokens."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.harness import Harness, Sequence, leave_parts
from tests.rounding import exact_and_bound, sums_in_order
from tests.tiny import ARCHITECTURES as PLAIN
from tests.tiny import MAMBA_ARCHITECTURES, make_checkpoint, make_model, shared_model
from tests.whole import unless_long

ARCHITECTURES = (*PLAIN, *MAMBA_ARCHITECTURES)
LENGTHS = unless_long([1, 64, 65, 210], [1, 63, 64, 65, 130, 210])
STEPS = unless_long([8], [40])[0]
TOLERANCE = 1e-4
HYBRID = (
    *(
        a
        for a in PLAIN
        if a.startswith(
            (
                "Qwen3Next",
                "Qwen3_5",
                "Lfm2",
                "Lfm3",
                "OlmoHybrid",
                "KimiLinear",
                "BailingHybrid",
                "Glm5Next",
                "Qwen4Exp",
                "Gemma3",
                "GptOss",
                "Inkling",
                "RecurrentGemma",
                "Zaya",
            )
        )
    ),
    *MAMBA_ARCHITECTURES,
)
IN_THE_MATRIX = {
    f"{name}ForCausalLM" for name in (
        "Bamba", "Lfm2", "MiniMax", "RecurrentGemma", "Zaya",
    )
}  # fmt: skip
"""Families whose stored states are reused in ``tests/test_x_matrix_layers.py``."""
STORED_HERE = {arch for arch in HYBRID if arch.endswith("CausalLM") or "Glm5" in arch} - IN_THE_MATRIX
"""Families whose stored states CI continues. Models with images have those of their text models."""
ELSEWHERE = IN_THE_MATRIX | {
    f"{name}For{task}" for name, task in product(
        ("GptOss", "Qwen3", "Qwen3Next"),
        ("CausalLM", "ConditionalGeneration"),
    )
}  # fmt: skip
ONLY_HERE = [arch for arch in ARCHITECTURES if arch not in ELSEWHERE]
"""Families whose padded decodes no x-matrix of CI runs."""
LEAVE_NO_SUMS = (
    "FalconH1", "FalconMamba", "Gemma3", "Glm5Next", "GptOss", "Inkling", "Lfm3", "Mamba", "MiniMax", "OlmoHybrid",
    "Qwen4Exp", "RecurrentGemma", "Zamba", "Zaya",
)  # fmt: skip
"""Their blocks' outputs are scaled, added up, normalised or biased before they reach the residual stream, or come from
mixers that leave no sums."""


def prompt(length: int, vocab_size: int = 211) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def reference_logits(reference: Any, tokens: list[int]) -> Tensor:
    """``[len(tokens), vocab_size]`` of one uncached pass."""
    with torch.no_grad():
        return reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def assert_logits(got: Tensor, reference: Any, tokens: list[int], first: int = 0) -> None:
    """The logits after each token from the ``first`` one on are the reference's.

    Some of these models magnify rounding by a hundred, the reference's own too. Where sums are added one number after
    another, logits beyond the tolerance must be as near to the exact ones as rounding explains (``tests/rounding.py``).
    """
    assert_equal(got, reference, tokens, first, reference_logits(reference, tokens))


def assert_equal(got: Tensor, reference: Any, tokens: list[int], first: int, want: Tensor) -> None:
    assert got.shape == want[first:].shape
    if sums_in_order() and not (got - want[first:]).abs().max().item() < TOLERANCE:
        exact, bound = exact_and_bound(reference, tokens)
        assert (got - exact[first:]).abs().max().item() <= bound
    else:
        assert (got - want[first:]).abs().max().item() < TOLERANCE


def assert_greedy(reference: Any, tokens: list[int], prompt_length: int) -> Tensor:
    """The tokens after the prompt are those that the reference chooses greedily. Returns its logits after each token of
    the prompt.

    One pass over the whole sequence suffices: if every token is the argmax after its predecessors, greedy decoding
    would have produced just these.
    """
    logits = reference_logits(reference, tokens)
    assert tokens[prompt_length:] == logits[prompt_length - 1 : -1].argmax(-1).tolist()
    return logits[:prompt_length]


def load(arch: str, path: Path, **overrides: Any) -> tuple[Harness, Any]:
    folder = make_checkpoint(arch, path, **overrides)
    return Harness(folder), shared_model(arch, **overrides)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_prompts_of_all_lengths_and_forty_greedy_tokens(arch: str, tmp_path: Path) -> None:
    """Eight where long tests do not run."""
    harness, reference = load(arch, tmp_path)
    sequences = [harness.sequence(prompt(n)) for n in LENGTHS]
    logits = [harness.run([(sequence, len(sequence.tokens))])[0] for sequence in sequences]
    harness.decode(sequences, logits, STEPS)
    for sequence, n, got in zip(sequences, LENGTHS, logits, strict=True):
        assert len(sequence.tokens) == n + STEPS
        assert_equal(got, reference, sequence.tokens[:n], 0, assert_greedy(reference, sequence.tokens, n))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_chunked_prefill_mixed_batches_and_padding(arch: str, tmp_path: Path) -> None:
    """Decodes and prefill chunks of several sequences in one forward, with NaN padding rows; nothing leaks."""
    harness, reference = load(arch, tmp_path)
    lengths = (64, 130, 65, 1)
    a, b, c, d = (harness.sequence(prompt(n)) for n in lengths)
    steps = [
        ([(a, 64), (b, 1)], 3, 1),
        ([(a, 1), (b, 62), (c, 37)], 1, 0),  # a decodes its own prompt's continuation below
        ([(b, 2), (c, 28), (a, 1), (d, 1)], 5, 2),
        ([(a, 1), (d, 1), (b, 65)], 2, 3),
    ]
    got: dict[int, list[Tensor]] = {id(s): [] for s in (a, b, c, d)}
    for sequence in (a, d):
        sequence.tokens += prompt(7)
    for work, pad_tokens, pad_seqs in steps:
        for (sequence, _), logits in zip(
            work, harness.run(work, pad_tokens=pad_tokens, pad_seqs=pad_seqs), strict=True
        ):
            got[id(sequence)].append(logits)
    for sequence in (a, b, c, d):
        done = torch.cat(got[id(sequence)])
        assert done.shape[0] == sequence.num_computed
        assert_logits(done, reference, sequence.tokens[: sequence.num_computed])


@pytest.mark.parametrize("arch", unless_long(ONLY_HERE, ARCHITECTURES))
def test_padded_decode_steps(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sums left to the norms that follow, as on a GPU, in families that have such norms."""
    left = leave_parts(monkeypatch)
    harness, reference = load(arch, tmp_path)
    sequences = [harness.sequence(prompt(n)) for n in (5, 66, 17)]
    logits = [harness.run([(s, len(s.tokens))], pad_tokens=1, pad_seqs=1)[0] for s in sequences]
    harness.decode(sequences, logits, 8, pad_tokens=5, pad_seqs=5)
    assert bool(left) == (not arch.startswith(LEAVE_NO_SUMS))
    for sequence, n in zip(sequences, (5, 66, 17), strict=True):
        assert_greedy(reference, sequence.tokens, n)


@pytest.mark.parametrize("arch", unless_long([arch for arch in HYBRID if arch in STORED_HERE], HYBRID))
def test_states_stored_at_any_position_continue_the_sequence(arch: str, tmp_path: Path) -> None:
    """A checkpoint ordered at position p holds the state of a run that stops there, wherever p stands."""
    harness, reference = load(arch, tmp_path)
    tokens = prompt(150)
    source = harness.sequence(tokens)
    positions = (1, 63, 64, 149)
    source.checkpoints = {p: harness.free_slot() for p in positions}
    assert_logits(harness.run([(source, 150)])[0], reference, tokens)
    for position, slot in source.checkpoints.items():
        stopped = harness.sequence(tokens[:position])
        harness.run([(stopped, position)])
        for name, cache in harness.caches.items():
            for role in cache.keys() & {"conv", "recurrent"}:  # windows hold what nobody reads, too
                want, found = cache[role][stopped.slot], cache[role][slot]
                error = (found - want).abs().max() / want.abs().max().clamp(min=1.0)
                assert error < 1e-4, f"{name}.{role} at {position}"
        harness.release(stopped)
        fork = Sequence(tokens, slot, source.pages, num_computed=position)
        assert_logits(harness.run([(fork, 150 - position)])[0], reference, tokens, position)


LFM2_MOE, QWEN2_MOE, OLMO = "Lfm2MoeForCausalLM", "Qwen2MoeForCausalLM", "OlmoHybridForCausalLM"
GEMMA, GPT_OSS = "Gemma3ForCausalLM", "GptOssForCausalLM"
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}
LFM3 = "Lfm3ForCausalLM"
LFM3_ROPE = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 50.0, "partial_rotary_factor": 0.3, "factor": 2.0},
    "sliding_attention": {"rope_type": "linear", "rope_theta": 70.0, "factor": 4.0},
}
KIMI, LING = "KimiLinearForCausalLM", "BailingHybridForCausalLM"
QWEN4 = "Qwen4ExpForCausalLM"
GLM5_NEXT = "Glm5NextForConditionalGeneration"
NO_ROPE = {"rope_type": "default", "rope_theta": None}
LFM2, MISTRAL, QWEN2 = "Lfm2ForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"
BAMBA, MAMBA2, FALCON_H1 = "BambaForCausalLM", "Mamba2ForCausalLM", "FalconH1ForCausalLM"
ZAMBA, ZAMBA2 = "ZambaForCausalLM", "Zamba2ForCausalLM"
ZAYA = "ZayaForCausalLM"
MINIMAX = "MiniMaxForCausalLM"
INKLING, INKLING2 = "InklingForCausalLM", "Inkling2ForCausalLM"
JAMBA, FALCON_MAMBA = "JambaForCausalLM", "FalconMambaForCausalLM"
GRANITE, NEMOTRON = "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM"
LLAMA, QWEN3, MOE, NEXT = "LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"
QWEN3_5, QWEN3_5_MOE, MULTIMODAL = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForConditionalGeneration"


def rope(partial: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": partial, **more}


GEOMETRIES: list[tuple[str, dict[str, Any]]] = [
    (LLAMA, {"num_attention_heads": 6, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    (LLAMA, {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None, "tie_word_embeddings": True}),
    (LFM2, {"conv_L_cache": 2, "conv_bias": True, "tie_word_embeddings": True, "block_auto_adjust_ff_dim": False}),
    (LFM2, {"conv_L_cache": 4, "layer_types": None, "full_attn_idxs": [1, 3], "block_ffn_dim_multiplier": 1.5}),
    (LFM3, {"conv_bias": True, "attention_bias": True, "use_attention_gate": False, "tie_word_embeddings": True}),
    (LFM3, {"rope_parameters": LFM3_ROPE, "num_attention_heads": 6, "num_key_value_heads": 1, "conv_L_cache": 4}),
    (LFM3, {"rope_parameters": None, "layer_types": None, "num_hidden_layers": 5}),
    (LFM2, {"num_attention_heads": 3, "num_key_value_heads": 1, "layer_types": ["conv"] * 4}),
    (LFM2_MOE, {"num_experts": 7, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5, "num_dense_layers": 0}),
    (LFM2_MOE, {"use_expert_bias": False, "norm_topk_prob": False, "conv_bias": True, "num_dense_layers": 3}),
    (BAMBA, {"mamba_n_groups": 1, "mamba_d_conv": 2, "mamba_conv_bias": False, "attn_layer_indices": [0, 3]}),
    (BAMBA, {"mamba_n_groups": 3, "mamba_proj_bias": True, "mlp_bias": True, "attention_bias": True}),
    (BAMBA, {"mamba_n_heads": 3, "mamba_n_groups": 3, "mamba_d_head": 32, "time_step_limit": [0.3, 0.8]}),
    (FALCON_H1, {"mamba_rms_norm": False, "mamba_proj_bias": True, "projectors_bias": True, "attention_bias": True}),
    (FALCON_H1, {"mamba_norm_before_gate": False, "mlp_bias": True, "mamba_d_ssm": 60, "mamba_d_head": 10}),
    (GRANITE, {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 1, "hidden_size": 60}
     | {"mamba_n_heads": 5, "mamba_d_head": 24, "num_attention_heads": 5, "num_key_value_heads": 1}),
    (GRANITE, {"tie_word_embeddings": True, "attention_bias": True, "mamba_proj_bias": True, "num_local_experts": 3}),
    (NEMOTRON, {"mlp_bias": True, "use_bias": True, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
    (NEMOTRON, {"moe_latent_size": 20}),
    (NEMOTRON, {"layers_block_type": ["mlp", "linear_attention", "full_attention"], "time_step_min": 0.4}),
    (JAMBA, {"num_experts": 1, "num_experts_per_tok": 1, "mamba_proj_bias": True, "mamba_conv_bias": False}),
    (JAMBA, {"attn_layer_period": 2, "attn_layer_offset": 0, "mamba_d_conv": 2, "mamba_expand": 3, "hidden_size": 60}),
    (FALCON_MAMBA, {"tie_word_embeddings": True, "use_bias": True, "conv_kernel": 3, "time_step_rank": 5,
                    "expand": 16, "intermediate_size": 72}),
    (MINIMAX, {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "layer_types": None}),
    (MINIMAX, {"head_dim": None, "tie_word_embeddings": True, "num_hidden_layers": 2,
               "layer_types": ["linear_attention"] * 2}),
    (ZAYA, {"num_key_value_heads": 1, "attention_bias": True, "layer_types": None, "tie_word_embeddings": True}),
    (ZAYA, {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 20, "cca_time0": 1, "cca_time1": 1}),
    (ZAYA, {"cca_time0": 4, "cca_time1": 1, "attention_bias": True, "rope_parameters": {
        "hybrid": {"rope_type": "linear", "rope_theta": 50.0, "partial_rotary_factor": 0.25, "factor": 2.0},
        "hybrid_sliding": {"rope_type": "default", "rope_theta": 70.0},
    }}),
    (ZAMBA, {"n_mamba_heads": 4, "mamba_proj_bias": True, "mamba_conv_bias": False, "num_key_value_heads": 1}),
    (ZAMBA, {"n_mamba_heads": 3, "mamba_d_conv": 3, "attention_head_dim": 20, "layers_block_type": ["hybrid"] * 5}),
    (ZAMBA2, {"use_shared_attention_adapter": False, "num_key_value_heads": 2, "use_mem_rope": False, "head_dim": 20,
              "layers_block_type": ["hybrid", "linear_attention"] * 3}),
    (ZAMBA2, {"num_mem_blocks": 1, "add_bias_linear": True, "mamba_ngroups": 3, "mamba_d_conv": 3}),
    (ZAMBA2, {"num_mem_blocks": 4, "mamba_expand": 3, "n_mamba_heads": 9, "mamba_ngroups": 1,
              "intermediate_size": None}),
    (MAMBA2, {"tie_word_embeddings": True, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3}),
    (MAMBA2, {"expand": 3, "num_heads": 9, "n_groups": 1, "state_size": 20, "time_step_limit": [0.0, 0.05]}),
    (MISTRAL, {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "hidden_size": 50}),
    (MISTRAL, {"head_dim": None, "tie_word_embeddings": True, "sliding_window": 512}),
    (GEMMA, {"layer_types": None, "sliding_window_pattern": 2, "num_attention_heads": 6, "num_key_value_heads": 1}),
    (GEMMA, {"tie_word_embeddings": False, "attention_bias": True, "head_dim": 10, "sliding_window": 1}),
    (GEMMA, {"rope_parameters": GEMMA_ROPE, "sliding_window": 600}),
    (GPT_OSS, {"layer_types": None, "num_attention_heads": 6, "num_key_value_heads": 1, "attention_bias": False,
               "sliding_window": 1, "tie_word_embeddings": True, "swiglu_alpha": 0.7, "num_experts_per_tok": 5}),
    (GPT_OSS, {"rope_parameters": None, "head_dim": 10, "hidden_size": 50, "sliding_window": 512}),
    (INKLING, {"layer_types": None, "local_layer_ids": [1, 2], "num_key_value_heads": 1, "n_shared_experts": 1,
               "swa_num_attention_heads": 6, "swa_num_key_value_heads": 2, "mlp_layer_types": None}),
    (INKLING, {"conv_kernel_size": 2, "sliding_window_size": 600, "rel_extent": 500, "log_scaling_n_floor": None,
               "mlp_layer_types": ["dense"] * 4, "head_dim": 20}),
    (INKLING, {"sliding_window_size": 1, "rel_extent": 1, "d_rel": 3, "n_shared_experts": 3, "num_experts_per_tok": 6,
               "logits_mup_width_multiplier": 0.8, "layer_types": None, "dense_mlp_idx": 2, "mlp_layer_types": None}),
    (INKLING2, {"layer_types": None, "num_hidden_layers": 7, "num_key_value_heads": 1, "swa_num_attention_heads": 6,
                "swa_num_key_value_heads": 2, "n_layers_per_attn_res_block": 1}),
    (INKLING2, {"layer_types": ["hybrid"] * 2 + ["hybrid_sliding"], "num_hidden_layers": 3, "conv_kernel_size": 2,
                "sliding_window_size": 600, "rel_extent": 500, "head_dim": 20, "n_layers_per_attn_res_block": 6}),
    (INKLING2, {"sliding_window_size": 1, "rel_extent": 1, "d_rel": 3, "num_experts_per_tok": 6, "conv_kernel_size": 5,
                "n_layers_per_attn_res_block": 2}),
    (KIMI, {"q_lora_rank": 18, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "linear_conv_kernel_dim": 2}),
    (KIMI, {"linear_num_heads": 3, "num_attention_heads": 5, "num_key_value_heads": 5, "n_shared_experts": 3}),
    (KIMI, {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"], "topk_group": 4}),
    (LING, {"kda_safe_gate": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_theta": 50.0}),
    (LING, {"num_attention_heads": 3, "num_key_value_heads": 3, "short_conv_kernel_size": 2, "n_shared_experts": 3}),
    (GLM5_NEXT, {"index_kpool": 1, "index_topk": 12, "hc_mult": 2, "linear_lower_bound": None,
                 "mlp_layer_types": None}),
    (GLM5_NEXT, {"index_kpool": 16, "index_topk": 32, "num_attention_heads": 3, "num_key_value_heads": 3,
                 "hc_sinkhorn_iters": 1, "swiglu_limit": 10.0, "n_group": 1, "topk_group": 1, "index_n_heads": 16}),
    (GLM5_NEXT, {"layer_types": ["full_attention", "linear_attention"] * 2, "norm_topk_prob": False}),
    (QWEN4, {"ple_layer_ids": [], "hc_count": 2, "indexer_compress_ratio": 1, "indexer_budget": 17}),
    (QWEN4, {"ple_layer_ids": [2], "ngram_size": 4, "heads_per_ngram": 1, "split_ngram_parts": 1, "seed": 5,
             "ple_conv_kernel_size": 4, "num_key_value_heads": 1, "indexer_n_heads": 16, "eos_token_id": [7, 9]}),
    (QWEN4, {"layer_types": ["full_attention", "linear_attention"] * 2, "ple_layer_ids": [2, 4], "ple_embed_dim": None,
             "num_experts": 7, "num_experts_per_tok": 3, "tie_word_embeddings": True, "output_gate_type": "silu"}),
    (OLMO, {"linear_allow_neg_eigval": False, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 51}),
    (OLMO, {"rope_parameters": NO_ROPE, "linear_num_key_heads": 1, "linear_conv_kernel_dim": 2}),
    (OLMO, {"attention_bias": True, "layer_types": ["full_attention"] * 2 + ["linear_attention", "full_attention"]}),
    (QWEN2, {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True}),
    (QWEN2, {"num_key_value_heads": 4, "hidden_size": 52, "use_sliding_window": True, "max_window_layers": 2}),
    (QWEN2, {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 17}),
    (QWEN2_MOE, {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 64}),
    (QWEN3, {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 65, "head_dim": 10}),
    (MOE, {"use_sliding_window": True, "sliding_window": 1}),
    (MISTRAL, {"sliding_window": 33, "num_key_value_heads": 1}),
    (QWEN2_MOE, {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True, "mlp_only_layers": []}),
    (QWEN2_MOE, {"qkv_bias": False, "decoder_sparse_step": 2, "tie_word_embeddings": True}),
    (QWEN3, {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "hidden_size": 50}),
    (QWEN3, {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 32, "vocab_size": 67}),
    (MOE, {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": False, "moe_intermediate_size": 17}),
    (MOE, {"num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2, "num_experts_per_tok": 5}),
    (MOE, {"num_experts": 1, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    (NEXT, {"linear_conv_kernel_dim": 2, "linear_num_key_heads": 1, "linear_num_value_heads": 3}),
    (NEXT, {"linear_conv_kernel_dim": 3, "linear_key_head_dim": 20, "mlp_only_layers": [0, 3]}),
    (NEXT, {"num_experts": 0, "layer_types": ["linear_attention", "full_attention"] * 2}),
    (MOE, {"num_experts": 0}),
    (NEXT, {"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "linear_attention"]}),
    (NEXT, {"num_experts": 3, "num_experts_per_tok": 3, "head_dim": 24, "attention_bias": True}),
    (NEXT, {"tie_word_embeddings": True, "norm_topk_prob": False, "rope_parameters": rope(0.75)}),
    (QWEN3_5, {"linear_conv_kernel_dim": 2, "linear_num_key_heads": 3, "linear_num_value_heads": 3}),
    (QWEN3_5, {"linear_conv_kernel_dim": 3, "num_key_value_heads": 4, "rope_parameters": rope(1.0)}),
    (QWEN3_5, {"tie_word_embeddings": True, "attention_bias": True}),
    (QWEN3_5_MOE, {"num_experts": 9, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 7}),
    (MULTIMODAL, {"tie_word_embeddings": True, "rope_parameters": rope(0.5, mrope_section=[2, 1, 1])}),
]  # fmt: skip
FEW_GEOMETRIES = [
    (arch, overrides)
    for number, (arch, overrides) in enumerate(GEOMETRIES)
    if number % 2 or arch in (ZAYA, INKLING2, FALCON_MAMBA)
]
"""CI runs every second one, and all where planted bugs show in one alone."""
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
ROPE_SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    YARN,
    YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    YARN | {"attention_factor": 0.9},
]


def check_geometry(arch: str, overrides: dict[str, Any], path: Path) -> None:
    harness, reference = load(arch, path, **overrides)
    vocab_size = harness.config.vocab_size
    sequences = [harness.sequence(prompt(n, vocab_size)) for n in (130, 65)]
    logits = harness.run([(s, len(s.tokens)) for s in sequences], pad_tokens=2, pad_seqs=1)
    harness.decode(sequences, logits, 6)
    for sequence, n, got in zip(sequences, (130, 65), logits, strict=True):
        assert_equal(got, reference, sequence.tokens[:n], 0, assert_greedy(reference, sequence.tokens, n))


@pytest.mark.parametrize(("arch", "overrides"), unless_long(FEW_GEOMETRIES, GEOMETRIES))
def test_awkward_geometries(arch: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    check_geometry(arch, overrides, tmp_path)


def test_published_names_of_olmo_hybrid(tmp_path: Path) -> None:
    """Three convolutions, and other names of the norms in layers of Gated DeltaNet."""
    folder = make_checkpoint(OLMO, tmp_path)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("linear_attn.conv1d.weight"):
            parts = zip("qkv", tensor.split([16, 16, 64]), strict=True)
            tensors |= {name.replace("conv1d", f"{part}_conv1d"): value.clone() for part, value in parts}
            continue
        if ".3." not in name:
            name = name.replace("input_layernorm", "attention_layer_norm")
            name = name.replace("post_attention_layernorm", "feedforward_layer_norm")
        tensors[name] = tensor
    assert len(tensors) > 40
    save_file(tensors, folder / "model.safetensors")
    harness = Harness(folder)
    sequence = harness.sequence(prompt(70))
    assert_logits(harness.run([(sequence, 70)])[0], make_model(OLMO), sequence.tokens)


@pytest.mark.parametrize("arch", [LLAMA, QWEN3])
@pytest.mark.parametrize("scaling", ROPE_SCALINGS)
def test_rope_scalings(arch: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    check_geometry(arch, {"rope_parameters": dict(scaling)}, tmp_path)


def test_yarn_with_partial_rotary(tmp_path: Path) -> None:
    check_geometry(NEXT, {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, tmp_path)
