"""Bugs to plant in what a checkpoint's files say: keys and their defaults, shares of ranks, weights and their names."""

from __future__ import annotations

from tests.mutation.mutant import mutant

CHECKPOINT, REFUSALS = "tests/config/test_checkpoint.py", "tests/config/test_checkpoint_refusals.py"
FAMILIES, MAMBA = "tests/config/test_checkpoint_families.py", "tests/config/test_mamba_families.py"
GENERATION, SHARDING = "tests/config/test_generation.py", "tests/config/test_sharding.py"
QUANTIZATION, FILES = "tests/config/test_quantization.py", "tests/weights/test_weight_files.py"
LOADING, SHARDS = "tests/quantization/test_loading.py", "tests/layers/test_tensor_parallel.py"
SPANNING, MEAN_SQUARE = "tests/layers/test_spanning_norm.py", "tests/ops/norm/test_mean_square.py"
HEADS = "tests/quantization/test_heads.py::test_drafts_change_no_token"
OWN_FILE = "tests/quantization/test_heads.py::test_modelopt_writes_a_file_of_its_own"
OF_PROJECTIONS = "tests/quantization/test_heads.py::test_modelopt_gives_scales_of_the_cache_to_projections"

CONFIGS_AND_WEIGHTS = (
    mutant(
        "nested-original-context-first", "the original context beside the rotary settings goes first",
        "weft/config/rope.py", '"original_max_position_embeddings", settings.integer(', '"", settings.integer(',
        CHECKPOINT,
    ),
    mutant(
        "older-partial-rotation-first", "the rotary settings' own share goes first", "weft/config/rope.py",
        'settings.number("partial_rotary_factor", config.number("partial_rotary_factor", partial_default or 1.0))',
        'config.number("partial_rotary_factor", settings.number("partial_rotary_factor", partial_default or 1.0))',
        CHECKPOINT,
    ),
    mutant(
        "older-rope-type-first", "rope_type goes before type", "weft/config/rope.py",
        'settings.text("rope_type", settings.text("type", "default"))',
        'settings.text("type", settings.text("rope_type", "default"))', CHECKPOINT,
    ),
    mutant(
        "rotary-settings-of-linear-layers", "settings by layer type are refused", "weft/config/rope.py",
        '("full_attention", "sliding_attention", "linear_attention")', '("full_attention", "sliding_attention")',
        REFUSALS,
    ),
    mutant(
        "more-than-the-head-turns", "no more than a head is rotated", "weft/config/rope.py",
        "if share > 1.0 or rotary_dim < 2", "if rotary_dim < 2", REFUSALS,
    ),
    mutant(
        "yarn-factor-of-one", "YaRN's factor follows from the contexts", "weft/config/rope.py",
        'settings.number("factor", max_positions / original)', 'settings.number("factor", 1.0)', CHECKPOINT,
    ),
    mutant(
        "no-mscale-of-zero", "mscale may be zero", "weft/config/rope.py",
        "parameters[key] = settings.number(key, open_low=False)", "parameters[key] = settings.number(key)", CHECKPOINT,
    ),
    mutant(
        "llama3-divides-by-zero", "equal frequency factors are refused", "weft/config/rope.py", "if high <= low:",
        "if high < low:", REFUSALS,
    ),
    mutant(
        "eos-of-the-file-first", "a text config's EOS goes first", "weft/config/checkpoint.py",
        'text.integers("eos_token_id") or top.integers("eos_token_id")',
        'top.integers("eos_token_id") or text.integers("eos_token_id")', CHECKPOINT,
    ),
    mutant(
        "dtype-of-the-file-first", "a text config's dtype goes first", "weft/config/checkpoint.py",
        '((text, "dtype"), (text, "torch_dtype"), (top, "dtype"), (top, "torch_dtype"))',
        '((top, "dtype"), (top, "torch_dtype"), (text, "dtype"), (text, "torch_dtype"))', CHECKPOINT,
    ),
    mutant(
        "dtype-with-its-module", "torch.float16 is a name of a dtype", "weft/config/checkpoint.py",
        'config.text(key).removeprefix("torch.")', "config.text(key)", CHECKPOINT,
    ),
    mutant(
        "quantization-of-the-file-alone", "a text config may name the quantisation", "weft/config/checkpoint.py",
        "read_quantization(top, text)", "read_quantization(top)", CHECKPOINT,
    ),
    mutant(
        "one-layer-of-drafts", "num_nextn_predict_layers is read", "weft/config/checkpoint.py",
        'text.integer("num_nextn_predict_layers", 1, low=0)', "1", CHECKPOINT,
    ),
    mutant(
        "lfm2-width-rounded-once", "two thirds are rounded before they are multiplied", "weft/config/families.py",
        'int(text.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))',
        'int(text.number("block_ffn_dim_multiplier", 1.0) * 2 * size / 3)', CHECKPOINT,
    ),
    mutant(
        "short-olmo-without-attention", "the last of fewer than four layers is attention", "weft/config/families.py",
        "    if num_layers < 4:\n", "    if num_layers < 1:\n", CHECKPOINT,
    ),
    mutant(
        "kimi-experts-beyond-groups", "a token has no more experts than the chosen groups", "weft/config/moe.py",
        "top_k > num_experts // groups * top_groups:", "top_k > num_experts:", FAMILIES,
    ),
    mutant(
        "kimi-one-dense-layer", "first_k_dense_replace is read", "weft/config/moe.py",
        'text.integer("first_k_dense_replace", 1, low=0)', "1", FAMILIES,
    ),
    mutant(
        "kimi-shared-expert-of-no-width", "no shared experts is none", "weft/config/moe.py",
        "shared_expert_intermediate_size=shared * width or None", "shared_expert_intermediate_size=shared * width",
        FAMILIES,
    ),
    mutant(
        "kimi-kernel-by-default", "short_conv_kernel_size is read", "weft/config/kimi.py",
        'nested.integer("short_conv_kernel_size", text.integer("linear_conv_kernel_dim", 4, low=2), low=2)',
        'text.integer("linear_conv_kernel_dim", 4, low=2)', FAMILIES,
    ),
    mutant(
        "kimi-layer-of-both-kinds", "no layer is of both kinds", "weft/config/kimi.py",
        "if full & delta or full | delta", "if full | delta", FAMILIES,
    ),
    mutant(
        "nemotron-experts-beyond-groups", "a token has no more experts than the chosen groups",
        "weft/config/mamba_families.py", "top_k > top_groups * (num_experts // groups)", "top_k > num_experts", MAMBA,
    ),
    mutant(
        "nemotron-older-time-step", "mamba_dt_min is time_step_min", "weft/config/mamba_families.py",
        '"mamba_dt_min": "time_step_min", ', "", MAMBA,
    ),
    mutant(
        "falcon-mamba-expands", "FalconMamba's intermediate_size goes before expand", "weft/config/mamba_families.py",
        '"intermediate_size": "mamba_d_inner",', "", "tests/models/test_parity.py::test_awkward_geometries",
    ),
    mutant(
        "top-k-of-minus-one", "top_k may be -1", "weft/config/generation.py", 'config.integer("top_k", low=-1)',
        'config.integer("top_k", low=0)', GENERATION,
    ),
    mutant(
        "notes-of-transformers-are-settings", "keys with an underscore ask for nothing", "weft/config/generation.py",
        ' and not key.startswith("_")', "", GENERATION,
    ),
    mutant(
        "temperature-above-zero", "temperature may be 0", "weft/config/generation.py",
        'config.number("temperature", open_low=False)', 'config.number("temperature")', GENERATION,
    ),
    mutant(
        "dense-mlps-beside-experts", "ranks share the MLPs of layers without experts", "weft/config/parallelism.py",
        "if moe is None or len(moe.sparse_layers) < model.num_hidden_layers:", "if moe is None:", SHARDING,
    ),
    mutant(
        "shared-experts-unchecked", "ranks share the shared expert", "weft/config/parallelism.py",
        "    if moe.shared_expert_intermediate_size is not None:", "    if False:", SHARDING,
    ),
    mutant(
        "whole-experts-unchecked", "ranks have as many experts each", "weft/config/parallelism.py",
        '        divide(moe.num_experts, size, "num_experts")', "        pass", SHARDING,
    ),
    mutant(
        "routers-in-all-layers", "layers without experts have no router", "weft/config/weights.py",
        "model.num_sparse_mlps * model.moe.router", "model.num_hidden_layers * model.moe.router",
        "tests/config/test_weights.py",
    ),
    mutant(
        "kv-cache-scales-of-each-step", "dynamic scales of an FP8 cache are refused",
        "weft/config/quantization_formats.py",
        '_is_fp8(kv_cache, strategy="tensor", dynamic=False)',
        '_is_fp8(kv_cache, strategy="tensor", dynamic=bool(kv_cache.raw("dynamic")))', QUANTIZATION,
    ),
    mutant(
        "asymmetric-weights", "asymmetric scales are refused", "weft/config/quantization_formats.py",
        '        and scheme.values.get("symmetric", True) is True\n', "", QUANTIZATION,
    ),
    mutant(
        "targets-of-the-last-group", "modules of every group are quantised", "weft/config/quantization_formats.py",
        "rules.append(Rule(_scheme_of_group", "rules[:] = [None]; rules[0] = (Rule(_scheme_of_group", QUANTIZATION,
    ),
    mutant(
        "older-name-of-the-scheme", "compression_config is read", "weft/config/quantization_formats.py",
        '("quantization_config", "compression_config")', '("quantization_config",)', QUANTIZATION,
    ),
    mutant(
        "patterns-from-anywhere", "a pattern holds from the beginning of a name", "weft/config/quantization.py",
        're.match(pattern.removeprefix("re:"), name)', 're.search(pattern.removeprefix("re:"), name)', QUANTIZATION,
    ),
    mutant(
        "ignored-layers-are-quantised", "ignored_layers is read", "weft/config/quantization_formats.py",
        ' + _patterns(config, "ignored_layers")', "", QUANTIZATION,
    ),
    mutant(
        "experts-under-our-names", "experts are left out by the names that checkpoints have for them",
        "weft/quantization/table.py", 'self._table.part_name(name, f"0.{matrix}weight")', 'f"{name}.0.{matrix[:-1]}"',
        LOADING,
    ),
    mutant(
        "aliases-are-not-published", "modules are left out by any name that checkpoints have for them",
        "weft/layers/weight.py", "        for stored, component in self.aliases.items():\n",
        "        for stored, component in ():\n", LOADING,
    ),
    mutant(
        "fused-parts-by-number", "a fused module is left out by its name", "weft/layers/weight.py",
        "        if leaf in self.fused and parameter[0].isdigit():\n            module_name", "        if False:\n"
        "            module_name", LOADING,
    ),
    mutant(
        "one-scale-for-two-parts", "a fused tensor's one scale is that of all its parts", "weft/layers/weight.py",
        "tuple(copy for piece in pieces for copy in piece.copies))", "pieces[0].copies)", LOADING,
    ),
    mutant(
        "part-of-a-head-is-none", "a head that lacks one tensor is there", "weft/weights/loader.py",
        " and len(missing) == num_mtp:", ":", "tests/models/test_mtp.py",
    ),
    mutant(
        "early-mamba2-files", "early files call the embedding otherwise", "weft/models/weight_names.py",
        '"backbone.embedding.": "model.embeddings.", ', "", "tests/weights/test_weights.py",
    ),
    mutant(
        "tied-head-with-more-rows", "a tied head has the embedding's shape", "weft/weights/loader.py",
        "    same = shape == embedding.shape and all(", "    same = all(", "tests/weights/test_weights.py",
    ),
    mutant(
        "index-before-the-file", "an index beside the one file does not matter", "weft/weights/safetensors_folder.py",
        "        if (self.folder / _SINGLE).is_file():", "        if False:", FILES,
    ),
    mutant(
        "unread-files-are-broken", "a file that cannot be read is not called broken",
        "weft/weights/safetensors_folder.py", "except OSError as error:", "except BufferError as error:", FILES,
    ),
    mutant(
        "fp8-experts-are-narrow", "FP8 experts are routed up to the same rows as wide ones", "weft/layers/moe.py",
        ' and experts.joined["gate_up"].element_size() > 1', "", "tests/layers/test_layers.py",
    ),
    mutant(
        "multipliers-of-all-ranks", "Falcon-H1's multipliers are those of this rank's parts", "weft/layers/mamba2.py",
        "zip(local.part_sizes, geometry.part_multipliers, strict=True)",
        "zip(geometry.part_sizes, geometry.part_multipliers, strict=True)", SHARDS,
    ),
    mutant(
        "mean-of-two-ranks", "a norm over all heads takes the mean over all ranks", "weft/layers/norm.py",
        "mean_square(x, self._num_ranks,", "mean_square(x, 2,", SHARDS,
    ),
    mutant(
        "mean-of-own-channels", "a norm over all heads takes the mean of all channels", "weft/layers/norm.py",
        "self._all_reduce(mean_square(x, self._num_ranks, backend=self._backend))",
        "mean_square(x, 1, backend=self._backend)", SPANNING,
    ),
    mutant(
        "gate-at-one-rank-alone", "a norm over ranks has its gate", "weft/layers/norm.py",
        "zero_centered=self._zero_centered, gate=gate,", "zero_centered=self._zero_centered,", SPANNING,
    ),
    mutant(
        "known-mean-without-eps", "a known mean square gets its eps", "weft/ops/norm/kernels.py",
        "tl.load(mean + row) + eps)", "tl.load(mean + row) + 1e-6)", MEAN_SQUARE,
    ),
    mutant(
        "known-mean-not-zero-centered", "the kernel for known mean squares adds 1 to zero-centred weights",
        "weft/ops/norm/kernels.py", "ZERO_CENTERED=zero_centered, GATED", "ZERO_CENTERED=False, GATED", MEAN_SQUARE,
    ),
    mutant(
        "known-mean-gate-without-sigmoid", "the gate of a norm of known mean squares is a sigmoid",
        "weft/ops/norm/kernels.py", "factor = sigmoid(tl.load(", "factor = (tl.load(", MEAN_SQUARE,
    ),
    mutant(
        "one-rounding-of-a-gated-norm", "a norm of known mean squares is rounded before its gate",
        "weft/ops/norm/kernels.py", "y = (y.to(tl.float32) * factor)",
        "y = (values * tl.rsqrt(tl.load(mean + row) + eps) * scale * factor)", MEAN_SQUARE,
    ),
    mutant(
        "mean-square-of-one-rank", "a rank's part of a mean square is divided by the ranks", "weft/ops/norm/kernels.py",
        "/ (WIDTH * RANKS))", "/ WIDTH)", MEAN_SQUARE,
    ),
    mutant(
        "mean-square-of-packed-rows", "mean squares are those of strided rows", "weft/ops/norm/kernels.py",
        "x, mean, x.stride(0), WIDTH=width, RANKS", "x, mean, width, WIDTH=width, RANKS", MEAN_SQUARE,
    ),
    mutant(
        "gate-rows-of-x", "a gate of a norm has a stride of its own", "weft/ops/norm/kernels.py",
        "x, mean, weight, other, out, eps, x.stride(0), other.stride(0),",
        "x, mean, weight, other, out, eps, x.stride(0), x.stride(0),", MEAN_SQUARE,
    ),
    mutant(
        "mlp-alone-without-its-sum", "a layer with an MLP alone sums what the layer before left",
        "weft/models/decoder.py", "partial = bool(self._mixers) or partial_input", "partial = bool(self._mixers)",
        SHARDS,
    ),
    mutant(
        "sandwiched-sum-twice", "what a norm has summed is not summed again", "weft/models/decoder.py",
        "self.pre_feedforward_layernorm = residual_norm(config, context, partial=False)",
        "self.pre_feedforward_layernorm = residual_norm(config, context, partial=True)", SHARDS,
    ),
    mutant(
        "first-layer-of-the-others-kind", "a first layer that sums its input is of a kind of its own",
        "weft/models/decoder.py", "place.sparse, place.partial_input and context.tp.size > 1)", "place.sparse)",
        SHARDS,
    ),
    mutant(
        "room-for-half-the-splits", "every sequence has room for its splits", "weft/ops/attention/merge.py",
        "min(table_tokens, 8 * double_from)", "min(table_tokens, 4 * double_from)",
        "tests/ops/attention/test_triton_attention.py",
    ),
    mutant(
        "gates-without-their-end", "columns beyond the last whole block are gated", "weft/ops/activation/kernels.py",
        "_gate_kernel[(cdiv(width, block), x.shape[0])]", "_gate_kernel[(max(1, width // block), x.shape[0])]",
        "tests/ops/test_triton_small.py",
    ),
    mutant(
        "gate-with-the-stride-of-x", "the scan's gate has a stride of its own", "weft/ops/mamba/scan.py",
        "num_rows, chunks.first.shape[0] - 1, x.stride(0), z.stride(0), dt.stride(0),",
        "num_rows, chunks.first.shape[0] - 1, x.stride(0), x.stride(0), dt.stride(0),",
        "tests/ops/mamba/test_selective_scan.py",
    ),
    mutant(
        "sigmoids-without-epsilon", "a small number is added to the sum of sigmoids", "weft/ops/moe/__init__.py",
        "weights = weights / (weights.sum(-1, keepdim=True) + rule.epsilon)",
        "weights = weights / weights.sum(-1, keepdim=True)", "tests/ops/moe/test_moe.py",
    ),
    mutant(
        "ids-below-the-first", "an expert of a rank before has no id", "weft/ops/moe/__init__.py",
        "(ids < 0) | (ids >= num_experts)", "ids >= num_experts", "tests/ops/moe/test_moe.py",
    ),
    mutant(
        "yarn-beyond-the-rotation", "YaRN's ramp ends with the rotated dimensions", "weft/ops/rotary/__init__.py",
        "low, high = max(low, 0), min(high, rope.rotary_dim - 1)", "low, high = max(low, 0), high",
        "tests/ops/norm/test_norm_rotary_activation.py",
    ),
    mutant(
        "yarn-divides-by-zero", "YaRN's ramp has a width", "weft/ops/rotary/__init__.py", "        high += 0.001",
        "        high += 0", "tests/ops/norm/test_norm_rotary_activation.py",
    ),
    mutant(
        "yarn-scales-shorter-contexts", "a factor of at most one scales nothing", "weft/ops/rotary/__init__.py",
        "return 1.0 if factor <= 1 else ", "return ", "tests/ops/norm/test_norm_rotary_activation.py",
    ),
    mutant(
        "yarn-by-mscale-alone", "mscale counts beside mscale_all_dim alone", "weft/ops/rotary/__init__.py",
        "if numerator and denominator:", "if numerator:", "tests/ops/norm/test_norm_rotary_activation.py",
    ),
    mutant(
        "drafts-of-the-first-rank", "each rank multiplies its share of the head's input", "weft/models/mtp.py",
        "both.chunk(self._num_ranks, dim=-1)[self._rank]", "both.chunk(self._num_ranks, dim=-1)[0]", SHARDS,
    ),
    mutant(
        "decays-of-the-first-rank", "lightning attention's rates are those of this rank's heads",
        "weft/layers/lightning_attention.py", "[tp.rank * heads : (tp.rank + 1) * heads]", "[:heads]", SHARDS,
    ),
    mutant(
        "heads-as-listed", "a head that is stored unquantised is read so", "weft/config/stored_names.py",
        '        return ("mtp",)\n', "        return ()\n", HEADS,
    ),
    mutant(
        "joint-projections-as-listed", "the first projection of a head is read as it is stored",
        "weft/config/stored_names.py", "    if joint and not any(", "    if False and not any(", HEADS,
    ),
    mutant(
        "file-of-modelopt-unread", "ModelOpt may have a file of its own", "weft/config/checkpoint.py",
        "model.quantization or read_quantization_file(folder)", "model.quantization", OWN_FILE,
    ),
    mutant(
        "scales-of-projections", "scales of a KV cache are found under ModelOpt's names", "weft/layers/weight.py",
        'name = _KV_SCALE.sub(".", stored)', "name = stored", OF_PROJECTIONS,
    ),
    mutant(
        "single-numbers-have-rows", "files may store a single number without dimensions", "weft/weights/loader.py",
        "source if shape else ()", "source", OF_PROJECTIONS,
    ),
    mutant(
        "keys-of-another-family", "errors name a key as the file does", "weft/config/json_object.py",
        "{self._called.get(key, key)}=", "{key}=", "tests/config/test_inkling.py",
    ),
    mutant(
        "as-many-sequences-as-tokens", "a step may have as many sequences as tokens", "weft/runner/batch_builder.py",
        "np.arange(max_num_tokens + 1)", "np.arange(max_num_tokens)", "tests/runner/test_padding.py",
    ),
    mutant(
        "unmasked-padding-of-decodes", "padding rows of decodes are zero", "weft/ops/padding.py",
        "return y.masked_fill_(padding, 0.0) if out is None", "return y if out is None",
        "tests/ops/window_attention/test_window_attention.py::test_decode_kernel",
    ),
    mutant(
        "decodes-pad-prompts", "padding of decodes leaves the rows of a given out", "weft/ops/padding.py",
        "out.copy_(torch.where(padding, out, y))", "out.copy_(y)",
        "tests/ops/window_attention/test_window_attention.py::test_decode_kernel",
    ),
)  # fmt: skip
