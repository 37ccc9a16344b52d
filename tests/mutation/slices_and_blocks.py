"""Bugs to plant in residual streams, attention by blocks, slices of restores, files of ranks, and coded products."""

from __future__ import annotations

from tests.mutation.mutant import mutant

STREAMS, DENSE, TOKENS = (
    "weft/ops/streams/gated_kernels.py", "weft/ops/indexed_attention/dense.py", "weft/ops/indexed_attention/tokens.py",
)  # fmt: skip
ATTEND, FEW = "weft/ops/indexed_attention/attend.py", "weft/ops/linear/coded_few_rows_hopper.py"
DISK, RESULTS, FILES = "weft/offload/disk.py", "weft/runner/file_results.py", "weft/runner/host_files.py"
RESTORES, BUILD, MEMORY = "weft/offload/restores.py", "weft/offload/build.py", "weft/runner/host_memory.py"
INKLING2, CLIPPED, FP8 = (
    "weft/config/inkling2.py", "weft/layers/clipped_attention.py", "weft/ops/moe/fp8_experts.py",
)  # fmt: skip

GATED, INDEXED = "tests/ops/streams/test_gated_streams.py", "tests/ops/indexed_attention/test_indexed_attention.py"
TIER, FUZZ, FOLDER, RANKS = (
    "tests/offload/test_tier.py", "tests/offload/test_tier_fuzz.py", "tests/offload/test_disk.py",
    "tests/offload/test_ranks.py",
)  # fmt: skip
BLOCKS = f"{INDEXED}::test_blocks_of_tokens"
THREADS, LINK = "tests/runner/test_host_files.py", "tests/offload/test_host_link.py"
CODED, EXPERTS = "tests/ops/linear/test_gluon_coded.py", "tests/ops/moe/test_triton_fp8_moe.py"
PARITY = "tests/models/test_parity.py::test_prompts_of_all_lengths_and_forty_greedy_tokens"
CAPPED, GEOMETRIES = f"{PARITY}[Inkling2ForCausalLM]", "tests/models/test_parity.py::test_awkward_geometries"

SLICES_AND_BLOCKS = (
    mutant(
        "gates-of-the-first-stream", "every stream has gates of its own", STREAMS,
        "gates + token * stride_gates + n * WIDTH + columns", "gates + token * stride_gates + columns", GATED,
    ),
    mutant(
        "mean-of-four-streams", "the mean divides by the number of streams", STREAMS,
        "(total / COUNT)", "(total / 4)", GATED,
    ),
    mutant(
        "logits-of-a-sum", "a stream's logit is divided by the number of streams", STREAMS,
        "stride_logits + n).to(tl.float32) / COUNT)", "stride_logits + n).to(tl.float32))", GATED,
    ),
    mutant(
        "repeated-streams-unread", "streams may be one stream repeated", STREAMS,
        "p_stream = streams + token * stride_token + n * stride_stream + columns",
        "p_stream = streams + (token * COUNT + n) * WIDTH + columns", GATED,
    ),
    mutant(
        "logits-side-by-side", "rows of logits are strided", STREAMS,
        "logits + token * stride_logits + n", "logits + token * COUNT + n", GATED,
    ),
    mutant(
        "shares-of-the-gates", "the last columns are the shares of the output", "weft/layers/residual_streams.py",
        "down[:, self._rank : self._rank + self._count]", "down[:, : self._count]", f"{PARITY}[Qwen4ExpForCausalLM]",
    ),
    mutant(
        "marks-of-one-row", "a token has its own selection", DENSE,
        "words + row * num_words + (pools >> 5)", "words + (pools >> 5)", BLOCKS,
    ),
    mutant(
        "tail-of-later-tokens", "a token sees no later token of its pool", DENSE,
        "(keys[None, :] >= tails[:, None]) & (keys[None, :] <= positions[:, None])", "keys[None, :] >= tails[:, None]",
        BLOCKS,
    ),
    mutant(
        "positions-of-the-block", "positions count from the sequence's last token in the block", DENSE,
        "positions = length - last + rows", "positions = length - end + rows", BLOCKS,
    ),
    mutant(
        "too-few-words", "a token's marks have room for the longest context that blocks read", DENSE,
        "2 * tokens * count * pool // 5)", "tokens * count * pool // 5)", BLOCKS,
    ),
    mutant(
        "marks-of-a-neighbour", "a tile's word is that of its first pool", DENSE,
        "p_words + start // POOL // 32", "p_words + start // 32", BLOCKS,
    ),
    mutant(
        "queries-of-one-group", "a key head has its own query heads", DENSE,
        "heads = kv_head * GROUP + lanes % GROUP", "heads = lanes % GROUP", BLOCKS,
    ),
    mutant(
        "two-rules-for-blocks", "both kernels agree which tokens are whose", ATTEND,
        "0 if tile is None else tile.rows // group", "0 if tile is None else tile.rows // (2 * group)", BLOCKS,
    ),
    mutant(
        "blocks-beside-splits", "tokens whose keys several programs share are not left to blocks", ATTEND,
        "None if same or max_splits > 1 or is_decode(batch)", "None if same or is_decode(batch)", INDEXED,
    ),
    mutant(
        "short-read-is-the-end", "a file that is read in parts is whole", DISK,
        'content.cast("B")[done - _HEAD_BYTES :]], done)', 'content.cast("B")], done)', FOLDER,
    ),
    mutant(
        "short-write-repeats", "a file that is written in parts is whole", DISK,
        "[max(0, done - len(head)) :]", "[0:]", FOLDER,
    ),
    mutant(
        "padding-of-a-header-unread", "a file that differs in anything is rejected", DISK,
        " or head.count(0, _START.size + length) != _HEAD_BYTES - _START.size - length", "", FOLDER,
    ),
    mutant(
        "one-read-of-the-pipe", "results are read until the pipe is empty", RESULTS,
        "while part := os.read(self._read_end, _PIPE_BYTES):\n                data += part",
        "data = os.read(self._read_end, _PIPE_BYTES)", THREADS,
    ),
    mutant(
        "last-rank-decides", "an order fails if any rank fails", RESULTS,
        "result = number, num_bytes, before or reason", "result = number, num_bytes, reason", RANKS, THREADS,
    ),
    mutant(
        "full-pipe-loses", "a result waits while the pipe is full", RESULTS,
        "while not self._sent(message) and not self._stopped.wait(_RETRY_S):\n                continue",
        "self._sent(message)", THREADS,
    ),
    mutant(
        "removal-ends-its-task", "orders after a removal that fails are run", FILES,
        "with suppress(OSError):  # the other", "if True:  # the other", THREADS,
    ),
    mutant(
        "select-counts-to-1024", "results come in a process with many open files", RESULTS,
        "self._readable.poll(_WAIT_MS)", "select.select([self._read_end], [], [], _WAIT_MS / 1000)", THREADS,
    ),
    mutant(
        "batches-lose-their-last", "every order of a step is run", FILES,
        "given[begin : begin + BATCH]", "given[begin : begin + BATCH - 1]", THREADS, FOLDER,
    ),
    mutant(
        "files-do-not-wait", "a rank writes what its own copies have stored", FILES,
        "for event in earlier:\n                event.synchronize()\n            ", "", THREADS,
    ),
    mutant(
        "copies-of-one-direction", "file orders wait for copies in both directions", "weft/runner/host_link.py",
        "(self._down, self._up), strict=True", "(self._down, self._down), strict=True", LINK,
    ),
    mutant(
        "late-files-of-ranks", "file orders wait for copies without a restore too", MEMORY,
        "self._host.has_ranks and (step.files or step.restores)", "self._host.has_ranks and step.restores",
        "tests/offload/test_host_memory.py", RANKS,
    ),
    mutant(
        "stopped-restores-stay-pinned", "a restore that stops keeps no places", RESTORES,
        "        self.tier.unpin(active.unordered)\n", "", TIER, FUZZ,
    ),
    mutant(
        "all-slices-at-once", "a step orders few slices", RESTORES,
        "while len(self._orders) < SLICES_PER_STEP and self._num_outstanding", "while self._num_outstanding", TIER,
        FUZZ,
    ),
    mutant(
        "restores-are-no-use", "a restored prefix is evicted later than others", RESTORES,
        "            self.tier.touch(below)\n", "            pass\n", TIER, FUZZ,
    ),
    mutant(
        "bytes-of-all-ranks", "the bound on files is that of all ranks", BUILD,
        "int(config.kv_offloading_disk_size * 2**30) // ranks", "int(config.kv_offloading_disk_size * 2**30)", RANKS,
        FOLDER,
    ),
    mutant(
        "slices-of-small-pages", "a slice has few pages, however small they are", BUILD,
        "min(SLICE_PAGES, slice_pages(plan_tier(config, manager.spec)))",
        "slice_pages(plan_tier(config, manager.spec))", "tests/offload/test_engine.py",
    ),
    mutant(
        "scales-of-groups-of-128", "chunks of a group share a scale", FEW,
        "places = (chunks // FIXED.group * FIXED.width)", "places = (chunks * FIXED.width)", CODED,
    ),
    mutant(
        "scales-of-the-first-experts", "an expert has as many scales as groups",
        "weft/ops/moe/coded_pairs_hopper.py",
        "expert * (FIXED.chunks // FIXED.group * FIXED.width)", "expert * (FIXED.chunks * FIXED.width)", CODED,
    ),
    mutant(
        "bias-of-the-coded-rows", "plain rows have their own bias", FEW,
        "store(total, bias + WIDTH, out + WIDTH,", "store(total, bias, out + WIDTH,", CODED,
    ),
    mutant(
        "groups-of-half-chunks", "the kernel for Hopper takes groups of whole chunks", FEW,
        " and matrix.group % 128 == 0", "", CODED,
    ),
    mutant(
        "float16-scales-taken", "the kernel for Hopper multiplies in bfloat16", FEW,
        " and matrix.scales.dtype == torch.bfloat16", "", CODED,
    ),
    mutant(
        "clamped-on-one-side", "the other factor is clamped on both sides", "weft/ops/activation/kernels.py",
        "values = tl.minimum(tl.maximum(values, -limit), limit)", "values = tl.minimum(values, limit)",
        "tests/ops/test_triton_small.py::test_gates",
    ),
    mutant(
        "dense-mlps-unclamped", "dense MLPs clamp as experts do", "weft/layers/mlp.py",
        "self.gate_up_proj(x), limit=self._limit,", "self.gate_up_proj(x),",
        f"{PARITY}[Glm5NextForConditionalGeneration]",
    ),
    mutant(
        "large-tiles-for-blocks", "large tiles are for scales of rows", FP8,
        "if block == 0 and num_tokens * top_k", "if num_tokens * top_k", EXPERTS,
    ),
    mutant(
        "one-swish-for-all", "experts may have a factor inside the sigmoid", "weft/ops/moe/blocks.py",
        "tl.exp(-alpha * gate)", "tl.exp(-gate)", f"{EXPERTS}::test_activations_that_are_not_swiglu",
    ),
    mutant(
        "outputs-of-five-terms", "the sum of a convolution is divided by the root of its terms", INKLING2,
        'text.integer("hidden_size"), kernel, scale=(kernel + 1) ** -0.5', 'text.integer("hidden_size"), kernel, '
        "scale=5**-0.5", CAPPED, GEOMETRIES,
    ),
    mutant(
        "keys-of-five-terms", "the sum of a window's convolution is divided by the root of its terms", CLIPPED,
        "scale=(kernel + 1) ** -0.5", "scale=5**-0.5", CAPPED, GEOMETRIES,
    ),
    mutant(
        "taps-of-nine-terms", "a dynamic convolution is divided by the root of its terms",
        "weft/layers/dynamic_conv.py", "(2 * kernel + 1) ** -0.5", "9**-0.5", CAPPED, GEOMETRIES,
    ),
    mutant(
        "biases-without-position", "biases grow with the position as scores do", CLIPPED,
        "near * factor", "near", CAPPED, GEOMETRIES,
    ),
    mutant(
        "logits-of-other-caps", "logits are capped by the checkpoint's number", "weft/models/inkling2.py",
        "/ self._cap) * self._cap", "/ 30.0) * 30.0", CAPPED, "tests/models/test_inkling2.py",
    ),
    mutant(
        "files-of-transformers-refused", "files that transformers wrote are read", "weft/config/wrappers.py",
        ' and not top.given("transformers_version")', "", "tests/config/test_inkling2.py",
        "tests/models/test_wrappers.py",
    ),
)  # fmt: skip
