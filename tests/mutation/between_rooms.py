"""Bugs to plant between rooms: drafts on the device, sampling, last rows, captures, replicas, API processes, ranks."""

from __future__ import annotations

from tests.mutation.mutant import mutant

BETWEEN_ROOMS = (
    mutant(
        "row-history-unfilled", "n-gram drafts know the prompt of a row", "weft/runner/step_runner.py",
        "            if self.drafts is not None:\n                self.drafts.add_row(new)\n", "",
        "tests/speculation/test_ngram.py",
    ),
    mutant(
        "longest-suffix-ignored", "n-gram drafts look up suffixes up to the longest",
        "weft/runner/drafting/drafters.py",
        "config.prompt_lookup_min, config.prompt_lookup_max", "config.prompt_lookup_min, config.prompt_lookup_min",
        "tests/speculation/test_ngram.py", "tests/ops/drafts/test_triton_drafts.py",
    ),
    mutant(
        "history-of-last-token-only", "all tokens that a step sampled are in the row's history",
        "weft/runner/drafting/drafters.py", "[[start + min(i, n - 1) for i in range(query_len)]",
        "[[start + n - 1 for i in range(query_len)]", "tests/speculation/test_ngram.py",
    ),
    mutant(
        "drafts-exceed-the-budget", "a step that follows a decode is within the token budget",
        "weft/scheduler/draft_steps.py", "if (1 + count) * len(running) > budget:", "if 1 + count > budget:",
        "tests/speculation/test_traffic.py",
    ),
    mutant(
        "following-past-the-last-token", "no step follows one in which a request may be through",
        "weft/scheduler/draft_steps.py", "if not is_there or request.will_be_full or", "if not is_there or",
        "tests/speculation/test_traffic.py", "tests/speculation/test_following_steps.py",
    ),
    mutant(
        "following-with-history-options", "a request whose options need its tokens on the host is not run ahead",
        "weft/scheduler/draft_steps.py", "or request.needs_tokens_on_host or", "or",
        "tests/speculation/test_ngram.py", "tests/speculation/test_following_steps.py",
    ),
    mutant(
        "slots-of-fewer-drafts-kept", "slots for more drafts than a batch gets go back", "weft/cache/draft_slots.py",
        "        for slot in lease.drafts.trim(num_drafts):\n            self.slots.release(slot)\n",
        "        lease.drafts.trim(num_drafts)\n", "tests/speculation/test_by_batch.py",
        "tests/speculation/test_traffic.py",
    ),
    mutant(
        "nan-hidden-by-the-scan", "a NaN among the logits is noticed", "weft/ops/sampling/kernels.py",
        'tl.max(tl.where(raw == raw, raw, float("inf")), 0)', 'tl.max(tl.where(raw == raw, raw, float("-inf")), 0)',
        "tests/ops/sampling/test_triton_sampling.py",
    ),
    mutant(
        "higher-token-among-equals", "the lower token wins among equal scores of several blocks",
        "weft/ops/sampling/kernels.py",
        "tl.store(out + index, tl.min(tl.where(wins, tokens, _NO_TOKEN), 0).to(tl.int64))",
        "tl.store(out + index, tl.max(tl.where(wins, tokens, -1), 0).to(tl.int64))",
        "tests/ops/sampling/test_triton_sampling.py",
    ),
    mutant(
        "min-p-alone-unfiltered", "min-p alone is a filter", "weft/ops/sampling/kernels.py",
        "filtered = not flags.all_greedy and (flags.candidates > 0 or flags.uses_min_p)",
        "filtered = not flags.all_greedy and flags.candidates > 0", "tests/ops/sampling/test_triton_sampling.py",
    ),
    mutant(
        "held-though-too-few", "a threshold below what is held draws from the whole row",
        "weft/ops/sampling/kernels.py", "            if threshold > floor:\n",
        "            if threshold > float('-inf'):\n", "tests/ops/sampling/test_triton_sampling.py",
    ),
    mutant(
        "padding-overwrites-a-last-row", "rows that pad the last layer's are no sequence's last",
        "weft/runner/logits_rows.py", "differ[0] if len(differ) else count", "0", "tests/runner/test_logits_rows.py",
    ),
    mutant(
        "drafts-of-few-rows", "a head that drafts sees all rows", "weft/runner/batch_builder.py",
        "return self.rules.drafts is None and (self._ends_sparse", "return (self._ends_sparse",
        "tests/speculation/test_model_drafts.py", "tests/speculation/test_heads.py",
    ),
    mutant(
        "prompt-logprobs-of-few-rows", "log probabilities of a prompt are read from all rows",
        "weft/runner/step_runner.py", "or shape.is_decode or needs_all_rows\n", "or shape.is_decode\n",
        "tests/runner/test_logits_rows.py", "tests/engine/test_logprobs.py",
    ),
    mutant(
        "prompt-logprobs-in-a-full-graph",
        "a step whose prompt log probabilities are wanted runs no graph that leaves rows out",
        "weft/runner/step_runner.py",
        "elif needs_all_rows and self.builder.selects_rows(shape):", "elif False:",
        "tests/runner/test_logits_rows.py", "tests/engine/test_logprobs.py",
    ),
    mutant(
        "few-rows-keep-their-batch", "the second half of the last layer runs as the batch of its rows",
        "weft/models/decoder.py",
        ("        with other_batch(rows.batch):\n"
         "            return self.feed_forward(mixed, rows.of(residual) if residual is not None else None)"),
        "        return self.feed_forward(mixed, rows.of(residual) if residual is not None else None)",
        "tests/runner/test_logits_rows.py",
    ),
    mutant(
        "decodes-not-overwritten", "a mixed batch's decodes advance their states", "weft/layers/recurrent.py",
        "    if count:\n        decode", "    if count > 1:\n        decode", "tests/runner/test_logits_rows.py",
        "tests/pieces/test_piecewise.py",
    ),
    mutant(
        "padding-rows-of-the-scan", "rows behind the last sequence are zero", "weft/ops/triton/chunk_scan.py",
        "        _zero_rows(out, num_tokens, num_rows, i_head, o_v, v_mask, H, V, CHUNK)\n", "",
        "tests/ops/delta_rule/test_triton_gdn.py",
    ),
    mutant(
        "state-of-a-new-sequence-read", "a sequence that starts here starts from zeros",
        "weft/ops/triton/chunk_scan.py", "continues = tl.load(seq_lens + i_seq) != query_len",
        "continues = tl.load(seq_lens + i_seq) > 0", "tests/ops/delta_rule/test_triton_gdn.py",
    ),
    mutant(
        "higher-expert-among-equals", "the lower expert id wins among equal logits", "weft/ops/moe/router.py",
        "keys = (keys << 16) | (0xFFFF - experts)", "keys = (keys << 16) | experts", "tests/ops/moe/test_triton_moe.py",
    ),
    mutant(
        "negative-zero-below-zero", "the two zeros are equal", "weft/ops/moe/router.py",
        "return tl.where(x == 0.0, 0, ordered)", "return ordered", "tests/ops/moe/test_triton_moe.py",
    ),
    mutant(
        "merge-misses-long-splits", "the merge cuts sequences as the decode kernel does",
        "weft/ops/attention/merge.py",
        "    num_splits = tl.cdiv(kv_len, split_of(kv_len, double_from, SPLIT))\n    wait(EARLY)",
        "    num_splits = tl.cdiv(kv_len, SPLIT)\n    wait(EARLY)", "tests/ops/attention/test_triton_attention.py",
    ),
    mutant(
        "too-few-splits-planned", "partial results have room for every split", "weft/ops/attention/merge.py",
        "lengths = min(table_tokens, double_from), min(table_tokens, 8 * double_from), table_tokens",
        "lengths = (table_tokens >> 2, table_tokens >> 1, table_tokens)",
        "tests/ops/attention/test_triton_attention.py",
    ),
    mutant(
        "compiled-captured-cold", "what is compiled runs before each of its captures", "weft/graph/graph_set.py",
        "warmed = set(sizes) if warm_every_size else {min(sizes), max(sizes)}", "warmed = {min(sizes), max(sizes)}",
        "tests/runner/test_step_graphs.py::test_sizes_run_before_their_capture",
    ),
    mutant(
        "captured-without-a-run", "the largest size runs before its capture", "weft/graph/graph_set.py",
        "warmed = set(sizes) if warm_every_size else {min(sizes), max(sizes)}",
        "warmed = set(sizes) if warm_every_size else {min(sizes)}",
        "tests/runner/test_step_graphs.py::test_sizes_run_before_their_capture",
    ),
    mutant(
        "collected-in-a-capture", "nothing is collected while a graph is captured", "weft/graph/graph_set.py",
        "with objects_frozen(), collector_off():", "with objects_frozen():", "tests/runner/test_step_graphs.py",
    ),
    mutant(
        "frozen-for-ever", "objects are collectable again behind a capture", "weft/processes/collector.py",
        "        gc.unfreeze()\n", "        pass\n", "tests/processes/test_collector.py", "tests/graph",
    ),
    mutant(
        "compilers-left-running", "compile processes end with the start", "weft/runner/compile_processes.py",
        "            self._kill()  # they have nothing left to do\n            self._pool.shutdown()\n",
        "            pass\n", "tests/runner/test_compile_processes.py",
    ),
    mutant(
        "answer-taken-for-silence", "a compiler that ends by a timeout of its own has answered",
        "weft/runner/compile_processes.py", "if compiled.done():  # compiling itself ended so", "if False:",
        "tests/runner/test_compile_processes.py",
    ),
    mutant(
        "fp8-pages-not-copied", "a partial page of an FP8 cache is copied", "weft/runner/cache_copies.py",
        "        self._move(pages, table[:, : len(pages)], self._pages)\n",
        "        self._move(pages, table[:, : len(pages)], [g for g in self._pages if g[0][0].element_size() > 1])\n",
        "tests/quantization/test_kv_cache.py",
    ),
    mutant(
        "passing-unknown", "a chunk that a tree only passes by is known", "weft/engine/router.py",
        "any({value, passing(value)} & known for", "any({value} & known for", "tests/engine/test_router.py",
    ),
    mutant(
        "only-the-first-chunk", "a long prompt is hashed as far as a replica knows it", "weft/engine/router.py",
        "            if not any(self.replicas[index].goes_beyond(chunk[-1]) for index in up):\n                break",
        "            break", "tests/engine/test_router.py",
    ),
    mutant(
        "reset-prefixes-remembered", "a replica whose cache was reset has nothing cached", "weft/engine/replicas.py",
        "            self._router.reset(member.index)\n", "", "tests/server/test_replicas.py",
    ),
    mutant(
        "image-keys-unrouted", "images are part of what a router compares", "weft/engine/replicas.py",
        "keys = cache_token_ids(prompt, message.media) if message.media else prompt", "keys = prompt",
        "tests/server/test_replicas.py", "tests/server/test_images.py",
    ),
    mutant(
        "moved-requests-count-twice", "a request that moves is open where it moved to", "weft/engine/replicas.py",
        "            else:\n                self._route(entry.message)",
        ("            else:\n"
         "                self._tell([wire.Update(entry.message.request_id, [], finish_reason='error')])"),
        "tests/server/test_replicas.py",
    ),
    mutant(
        "others-hear-the-end", "the end of a request is told before it is forgotten", "weft/server/api_servers.py",
        "            shares.setdefault(owner.index, []).append(update)\n            if update.finish_reason",
        ("            if update.finish_reason is None:\n"
         "                shares.setdefault(owner.index, []).append(update)\n"
         "            if update.finish_reason"),
        "tests/server/test_api_servers.py",
    ),
    mutant(
        "dead-process-keeps-the-engine-busy", "requests of an API process that died are aborted",
        "weft/server/api_servers.py", "            self._supervisor.send(wire.FinishRequests(lost))\n",
        "            pass\n", "tests/server/test_api_servers.py",
    ),
    mutant(
        "dead-process-counts", "completions of an API process that died are not open", "weft/server/api_servers.py",
        "        self._counts.forget(member.index)\n", "", "tests/server/test_api_servers.py",
    ),
    mutant(
        "unpushed-news-lost", "news that could not be pushed reach the reader", "weft/engine/response_stream.py",
        "        self._undelivered = deltas\n        return False", "        return False",
        "tests/server/test_pushed_tokens.py", "tests/server/test_async_engine.py",
    ),
    mutant(
        "end-is-pushed", "the end of a completion goes through the reader", "weft/engine/response_stream.py",
        "if not _has_end(deltas) and (not deltas or push(deltas)):", "if not deltas or push(deltas):",
        "tests/server/test_pushed_tokens.py",
    ),
    mutant(
        "rank-without-forks", "states are forked on every rank", "weft/executor/multi_process.py",
        "self._ring.send(encode_step(scheduler_output), self._workers.check)",
        ("self._ring.send(encode_step(__import__('msgspec').structs.replace(scheduler_output, "
         "state_forks=[], page_copies=[])), self._workers.check)"),
        "tests/executor/test_tensor_parallel.py",
    ),
    mutant(
        "rank-forgets-to-follow", "ranks follow the same steps", "weft/executor/multi_process.py",
        "self._ring.send(encode_step(scheduler_output), self._workers.check)",
        ("self._ring.send(encode_step(__import__('msgspec').structs.replace(scheduler_output, "
         "requests=[__import__('msgspec').structs.replace(r, follows=False) for r in "
         "scheduler_output.requests])), self._workers.check)"),
        "tests/speculation/test_model_drafts.py::test_two_ranks",
    ),
    mutant(
        "scan-takes-odd-rows", "the copy engine is given rows that it can address",
        "weft/ops/delta_rule/scan_hopper.py", " and x.stride(0) % 8 == 0", "",
        "tests/ops/delta_rule/test_gluon_delta_scan.py",
    ),
    mutant(
        "scan-takes-float32", "the scan on Hopper is for bfloat16", "weft/ops/delta_rule/scan_hopper.py",
        "x.dtype == torch.bfloat16 and ", "", "tests/ops/delta_rule/test_gluon_delta_scan.py",
    ),
    mutant(
        "scan-of-decodes-keeps-rows", "the rows of decodes are zero",
        "weft/ops/triton/chunk_scan.py", "begin = tl.load(chunk_start)", "begin = 0",
        "tests/ops/delta_rule/test_triton_gdn.py",
    ),
    mutant(
        "draft-fallback-dropped", "tokens that are edited behind a graph are drafted from again",
        "weft/runner/step_runner.py", "        if drafts is None and output.hidden_states is not None:",
        "        if False:", "tests/speculation/test_model_drafts.py", "tests/speculation/test_ngram.py",
    ),
    mutant(
        "verification-by-another-count", "a graph verifies as many drafts as the step", "weft/graph/dispatcher.py",
        "if size is not None and self.verification_sizes[size] == batch.query_len", "if size is not None",
        "tests/graph/test_dispatcher.py",
    ),
    mutant(
        "refused-logits-of-a-stop", "a draft that ends the text is not accepted",
        "weft/runner/drafting/drafters.py",
        "never = config.eos_token_ids if rules.on_device else ()", "never = ()",
        "tests/speculation/test_following_steps.py",
    ),
)  # fmt: skip
