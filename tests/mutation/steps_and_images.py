"""Bugs to plant in what is newest: drafts and their steps, orders of rows, sampling, images, locks of compilers,
replicas, measured modes, experts in FP8, refusals."""

from __future__ import annotations

from tests.mutation.mutant import mutant

IMAGES = "tests/test_fuzz_engine.py::test_random_images"
ENGINES = "tests/engine/test_images.py"
FOLLOWING = "tests/speculation/test_following_steps.py"

STEPS_AND_IMAGES = (
    mutant(
        "follows-past-the-context", "no step follows that may go past the longest context",
        "weft/scheduler/draft_steps.py", " or end > planner.max_model_len:", ":", FOLLOWING,
    ),
    mutant(
        "head-follows-decodes", "a step of drafts by the head follows no step of plain decodes",
        "weft/scheduler/draft_steps.py", "((0, count) if planner.may_be_none else (count,))", "(0, count)", FOLLOWING,
    ),
    mutant(
        "filled-drafts-counted", "only drafts that were found count as proposed", "weft/scheduler/draft_steps.py",
        "num_proposed = min(len(request.draft_token_ids), launched.num_drafts)", "num_proposed = launched.num_drafts",
        FOLLOWING,
    ),
    mutant(
        "old-rejections-kept", "a decode leaves no rejected drafts in its row", "weft/ops/drafts/__init__.py",
        "        state.num_rejected.index_copy_(0, rows, query_len - 1 - accepted)\n", "        pass\n",
        "tests/ops/drafts/test_triton_drafts.py", FOLLOWING,
    ),
    mutant(
        "drafts-counted-as-text", "n-gram drafts begin behind the last token that counts",
        "weft/runner/drafting/drafters.py",
        "lengths = [r.start + r.num_tokens - len(r.draft_token_ids) + query_len - 1 for",
        "lengths = [r.start + r.num_tokens + query_len - 1 for", "tests/speculation/test_ngram.py",
    ),
    mutant(
        "repeats-are-cut", "drafts behind a near occurrence repeat what follows it", "weft/ops/drafts/__init__.py",
        "start + step % (lengths - start)", "torch.minimum(start + step, lengths - 1)",
        "tests/ops/drafts/test_triton_drafts.py", "tests/speculation/test_ngram.py",
    ),
    mutant(
        "next-sequence-is-a-draft", "the first token of the next sequence is no draft of the one before",
        "weft/ops/drafts/__init__.py", "    drafts[query_len - 1 :: query_len] = NO_DRAFT\n", "",
        "tests/runner/drafting/test_acceptance.py", "tests/ops/drafts/test_triton_drafts.py",
    ),
    mutant(
        "drafts-of-images-by-place", "drafts behind images have rotary positions, not places in the sequence",
        "weft/ops/drafts/__init__.py", "(positions[last] + ahead).clamp(max=max_len - 1)", "places",
        "tests/ops/drafts/test_triton_drafts.py", "tests/speculation/test_images.py",
    ),
    mutant(
        "shortest-decode-first", "the decode with the longest context comes first in a step",
        "weft/scheduler/launches.py", "key=lambda pair: -pair[1].start if", "key=lambda pair: pair[1].start if",
        "tests/scheduler/test_scheduler.py",
    ),
    mutant(
        "padding-writes-rows", "padding of a decode samples for no request's row", "weft/runner/batch_builder.py",
        'self._put("sample_rows", rows, size, table.padding_row)', 'self._put("sample_rows", rows, size)',
        "tests/runner/test_padding.py",
    ),
    mutant(
        "padding-of-old-lengths", "padding sequences of a decode have one token of context",
        "weft/runner/batch_builder.py",
        'self._put("seq_lens", layout.seq_lens, size, padding_len)', 'self._put("seq_lens", layout.seq_lens, 0)',
        "tests/runner/test_padding.py",
    ),
    mutant(
        "programs-without-work-count", "attention releases what follows where few programs have work",
        "weft/ops/attention/decode.py", "release_by_work(EARLY, tl.minimum(num_splits, step), step)",
        "release_by_work(EARLY, step, step)", "tests/ops/triton/test_early_launch.py",
    ),
    mutant(
        "results-leave-their-memory", "memory for results is used again", "weft/runner/results.py",
        "self._free.append((self.host, self.done))", "pass", "tests/runner/test_results.py",
    ),
    mutant(
        "results-free-when-asked-for", "results of a step stay until they are read", "weft/runner/results.py",
        "self._free.pop() if self._free else self._allocate(), self._free)",
        "(self._free or self._free.append(self._allocate()) or self._free)[0], self._free)",
        "tests/runner/test_results.py",
    ),
    mutant(
        "results-without-drafts", "there is room for the results of all drafts", "weft/runner/step_runner.py",
        "ResultMemory(plan.max_num_seqs * (1 + config.num_drafts), device, backend)",
        "ResultMemory(plan.max_num_seqs, device, backend)", "tests/runner/test_results.py",
    ),
    mutant(
        "rejected-drafts-are-results", "only tokens that count are a sequence's", "weft/runner/results.py",
        "        counts_all=acceptance is None,\n", "        counts_all=True,\n", "tests/speculation",
    ),
    mutant(
        "ranks-end-in-flight", "what is in flight ends before the memory that it writes",
        "weft/executor/multi_process.py", "last is not None and not last.is_done", "False",
        "tests/executor/test_multi_process.py",
    ),
    mutant(
        "one-doubling", "every doubling between two sizes is measured", "weft/pieces/mode_table.py",
        "        while between < size:\n", "        if between < size:\n", "tests/pieces/test_mode_table.py",
    ),
    mutant(
        "decodes-measured-backwards", "timings of decodes stand in ascending order", "weft/bench/step_timing.py",
        '    found["decode"].reverse()\n', "", "tests/bench/test_step_timing.py", "tests/cli/test_tune.py",
    ),
    mutant(
        "ties-change-the-split", "a split that is as fast as the first one does not replace it",
        "weft/bench/step_timing.py", "return best if ratios[best] * TIE < 1 else first", "return best",
        "tests/bench/test_step_timing.py", "tests/cli/test_tune.py",
    ),
    mutant(
        "unlockable-belongs-to-others", "where no lock file can be made, a process compiles for itself",
        "weft/runner/compile_processes.py", "    except OSError:\n        yield True\n",
        "    except OSError:\n        yield False\n", "tests/runner/test_compile_processes.py",
    ),
    mutant(
        "options-share-a-lock", "a kernel of other options has a lock of its own", "weft/runner/compile_processes.py",
        'f"{src.hash()} {dict(options)}"', 'f"{src.hash()}"', "tests/runner/test_compile_processes.py",
    ),
    mutant(
        "compilers-are-interrupted", "Ctrl-C is left to the process that started the compilers",
        "weft/runner/compile_processes.py", "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n", "",
        "tests/runner/test_compile_processes.py",
    ),
    mutant(
        "intermediate-code-kept", "compilers leave no intermediate code in the cache",
        "weft/runner/compile_processes.py", "    triton.knobs.compilation.store_binary_only = True\n", "",
        "tests/runner/test_compile_processes.py",
    ),
    mutant(
        "router-shares-salts", "a router takes prompts of other salts for others", "weft/engine/prefix_hashes.py",
        "    before = _seed(salt)\n", "    before = _seed(None)\n", "tests/engine/test_router.py",
    ),
    mutant(
        "oldest-prefixes-reported", "a replica reports what was used last", "weft/engine/prefix_hashes.py",
        "sorted(found, key=found.__getitem__, reverse=True)[:MAX_REPORTED]",
        "sorted(found, key=found.__getitem__)[:MAX_REPORTED]", "tests/engine/test_router.py",
    ),
    mutant(
        "capacity-of-one", "a set runs as many requests as its replicas together", "weft/engine/replicas.py",
        "max_num_seqs=sum(c.max_num_seqs for c in known),", "max_num_seqs=capacity.max_num_seqs,",
        "tests/server/test_replicas.py",
    ),
    mutant(
        "one-scale-for-both", "the products of an expert have input scales of their own", "weft/ops/moe/__init__.py",
        "return product(hidden, expert, *down)", "return product(hidden, expert, *down[:2], gate_up[2])",
        "tests/ops/moe/test_triton_fp8_moe.py::test_experts_of_awkward_widths",
    ),
    mutant(
        "images-of-no-step-stay", "what a step that was not launched was to encode keeps nobody waiting",
        "weft/scheduler/encoder_cache.py",
        "        self.discard(self.take_encodings())\n", "", "tests/scheduler/test_encoder_cache.py", IMAGES,
    ),
    mutant(
        "first-used-evicted", "the image that was used longest ago makes room", "weft/scheduler/encoder_cache.py",
        "        self._entries.move_to_end(key)\n", "", "tests/scheduler/test_encoder_cache.py",
    ),
    mutant(
        "runs-of-a-video-share-rows", "each frame of a video has rows of its own", "weft/scheduler/encoder_cache.py",
        "                row += length\n", "", "tests/scheduler/test_encoder_cache.py", IMAGES,
    ),
    mutant(
        "texts-behind-images-by-place", "what follows an image has rotary positions behind it",
        "weft/runner/media_inputs.py", "    positions[: layout.bounds[-1]] += np.repeat(table.rope_delta[layout.rows], "
        "layout.counts)\n", "", IMAGES,
    ),
    mutant(
        "old-patches-replayed", "a captured tower sees the patches of its call", "weft/runner/media_inputs.py",
        "        self._patches[:count].copy_(patches)\n",
        "        self._patches[: count - 1].copy_(patches[: count - 1])\n",
        IMAGES,
    ),
    mutant(
        "pool-turned-by-its-end", "a pool's key is rotated by its first token's positions", "weft/layers/indexer.py",
        "places[(slots - (pool - 1)).clamp(min=0)]", "places[slots]", ENGINES,
    ),
    mutant(
        "places-of-this-step-alone", "a pool may begin in an earlier step", "weft/layers/indexer.py",
        "firsts = places[(slots - (pool - 1)).clamp(min=0)]",
        "firsts = self.table.index_select(0, (batch.positions - (pool - 1)).clamp(min=0))", ENGINES,
    ),
    mutant(
        "text-stores-no-places", "tokens of steps without images store their positions", "weft/layers/indexer.py",
        "        places.index_copy_(0, slots, self.table",
        "        if batch.may_have_media:\n            places.index_copy_(0, slots, self.table", ENGINES,
    ),
    mutant(
        "inkling-normed-images", "embeddings of images enter Inkling without a norm", "weft/models/inkling.py",
        "index == 0 and get_forward_context()", "index < 0 and get_forward_context()",
        "tests/engine/test_images.py::test_every_prompt_position[Inkling2ForConditionalGeneration]",
    ),
    mutant(
        "inkling-class-rows-read", "the square of class tokens is no embedding", "weft/runner/media_inputs.py",
        "start = end + self._class_rows // self._vision.merge_unit", "start = end",
        "tests/engine/test_images.py::test_every_prompt_position[Inkling2ForConditionalGeneration]",
    ),
    mutant(
        "inkling-unsorted-heads", "neighbouring channels of a head rotate together", "weft/models/inkling2_vision.py",
        "(self._paired, self._paired, whole)", "(whole, whole, whole)",
        "tests/engine/test_images.py::test_every_prompt_position[Inkling2ForConditionalGeneration]",
    ),
    mutant(
        "inkling-cells-in-columns", "cells of a patch fold row by row", "weft/models/inkling_vision.py",
        "(0, 1, 3, 5, 2, 4, 6, 7)", "(0, 1, 3, 5, 2, 6, 4, 7)",
        "tests/engine/test_images.py::test_every_prompt_position[InklingForConditionalGeneration]",
    ),
    mutant(
        "media-ids-hashed", "n-grams hash the placeholders of images", "weft/models/ngram.py",
        "if not get_forward_context().batch.may_have_media:", "if True:", ENGINES,
    ),
    mutant(
        "placeholders-of-the-start", "an image's token has the placeholder of its place", "weft/runner/media_inputs.py",
        "rows.known_tokens(request.row, position, position + count)", "rows.known_tokens(request.row, 0, count)",
        ENGINES,
    ),
    mutant(
        "any-place", "places that nobody wrote are bounded", "weft/layers/indexer.py",
        ".clamp(0, len(self._cos_sin) - 1)", "", "tests/test_x_matrix_images.py",
    ),
    mutant(
        "unknown-parameters-in-msgspecs-words", "an unknown sampling parameter is refused by name",
        "weft/sampling_params.py", "            raise _unknown(cls, args, given, error) from None\n",
        "            raise\n",
        "tests/test_sampling_params.py",
    ),
    mutant(
        "choice-of-characters", "a text is no list of choices", "weft/sampling_params.py",
        '"choice": ((list, tuple), ', '"choice": ((list, tuple, str), ', "tests/test_sampling_params.py",
    ),
)  # fmt: skip
