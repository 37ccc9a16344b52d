"""Bugs to plant, each with the promise that the bug breaks and the tests that should notice.

A mutant is one piece of text in one file, replaced by another. Where the text is gone, ``run`` says so: the mutant is
then rewritten for the code that took its place.
"""

from __future__ import annotations

from tests.mutation.between_rooms import BETWEEN_ROOMS
from tests.mutation.block_residuals import BLOCK_RESIDUALS
from tests.mutation.chained_heads import CHAINED_HEADS
from tests.mutation.configs_and_weights import CONFIGS_AND_WEIGHTS
from tests.mutation.convolutional_attention import CONVOLUTIONAL_ATTENTION
from tests.mutation.decays_as_products import DECAYS_AS_PRODUCTS
from tests.mutation.determinism import DETERMINISM
from tests.mutation.doors import DOORS
from tests.mutation.expanded_latents import EXPANDED_LATENTS
from tests.mutation.experts_in_blocks import EXPERTS_IN_BLOCKS
from tests.mutation.fields_and_figures import FIELDS_AND_FIGURES
from tests.mutation.heads_and_scales import HEADS_AND_SCALES
from tests.mutation.mutant import mutant as _mutant
from tests.mutation.mxfp8 import MXFP8
from tests.mutation.rows_and_responses import ROWS_AND_RESPONSES
from tests.mutation.settings_and_ends import SETTINGS_AND_ENDS
from tests.mutation.settings_and_reuse import SETTINGS_AND_REUSE
from tests.mutation.slices_and_blocks import SLICES_AND_BLOCKS
from tests.mutation.steps_and_images import STEPS_AND_IMAGES
from tests.mutation.tiers import TIERS
from tests.mutation.verification import VERIFICATION
from tests.mutation.waits_and_leaks import WAITS_AND_LEAKS

MUTANTS = (
    # -- found to survive by an audit ------------------------------------------------------------------------------
    _mutant(
        "llm-drops-turn-boundaries", "chat prompts carry where the next prompts leave them", "weft/engine/llm.py",
        "turn_boundaries=self.config.keeps_states,", "turn_boundaries=False,",
        "tests/engine/test_chat_prompts.py::test_chat_prompts_carry_their_turn_boundaries",
    ),
    _mutant(
        "server-drops-turn-boundaries", "chat requests carry where the next prompts leave them",
        "weft/engine/input_processor.py",
        "sorted({*chat.turn_boundaries, *own}) if own else chat.turn_boundaries", "own",
        "tests/server/test_model.py::test_another_question_reuses_the_system_block",
    ),
    _mutant(
        "server-drops-positions", "checkpoint_positions of a chat request count", "weft/engine/input_processor.py",
        "sorted({*chat.turn_boundaries, *own}) if own else chat.turn_boundaries", "chat.turn_boundaries",
        "tests/server/test_model.py::test_states_are_kept_where_a_request_says",
    ),
    _mutant(
        "chunk-ignores-decodes", "no step exceeds max_num_batched_tokens", "weft/scheduler/scheduler.py",
        "min(wanted, budget - decoding)", "min(wanted, budget)",
        "tests/scheduler/test_scheduler.py",
    ),
    _mutant(
        "runner-writes-stored-pages", "KV that is stored already is read and never written",
        "weft/runner/batch_builder.py", "if r.start < r.write_start:", "if False:",
        "tests/runner/test_batch_builder.py",
    ),
    _mutant(
        "old-snapshot-kept", "a decoding request keeps one snapshot", "weft/cache/draft_slots.py",
        "            self.slots.release(lease.checkpoints.snapshot[1])\n", "            pass\n",
        "tests/scheduler/test_prefix_reuse.py",
    ),
    _mutant(
        "compile-key-without-versions", "an artefact holds for the versions that it was made with",
        "weft/pieces/inductor.py", 'return "\\n".join([*versions, f"python {sys.version}", where])', "return where",
        "tests/pieces/test_sources.py::test_another_version_or_device_finds_nothing",
    ),
    _mutant(
        "compile-key-without-device", "an artefact holds for the device that it was made for",
        "weft/pieces/inductor.py", 'return "\\n".join([*versions, f"python {sys.version}", where])',
        'return "\\n".join([*versions, f"python {sys.version}"])',
        "tests/pieces/test_sources.py::test_another_version_or_device_finds_nothing",
    ),
    _mutant(
        "split-loses-order", "parts of a cut graph keep the original order", "weft/pieces/tracing.py",
        "keep_original_order=True", "keep_original_order=False",
        "tests/pieces/test_tracing.py",
    ),
    _mutant(
        "padding-meets-experts", "padding rows are sent to no expert", "weft/layers/moe.py",
        "num_tokens = batch.num_tokens if batch.token_count is None else batch.token_count",
        "num_tokens = logits.shape[0]",
        "tests/layers/test_layers.py::test_padding_rows_are_sent_to_no_expert",
    ),
    _mutant(
        "chat-doubles-bos", "a chat prompt has the BOS of its template only", "weft/engine/chat_prompts.py",
        "self._tokenizer.encode(text, add_special_tokens=False, limit=limit)",
        "self._tokenizer.encode(text, limit=limit)",
        "tests/engine/test_chat_prompts.py::test_a_bos_comes_from_the_template_alone",
    ),
    _mutant(
        "padding-claims-tokens", "padding sequences of a mixed batch have no tokens", "weft/runner/batch_builder.py",
        "ends_of_padding = real.num_tokens +", "ends_of_padding = padded.num_tokens +",
        "tests/runner/test_batch_builder.py",
    ),
    _mutant(
        "no-nvtx", "steps are marked for NVIDIA's profilers", "weft/runner/profiler.py",
        "torch.cuda.nvtx.range(name) if torch.cuda.is_available() else nullcontext()", "nullcontext()",
        "tests/runner/test_profiler.py",
    ),
    _mutant(
        "top-p-one-too-many", "top-p keeps the smallest set whose share reaches it", "weft/ops/sampling/__init__.py",
        "(before < share * mass[:, -1:])", "(before <= share * mass[:, -1:])",
        "tests/ops/sampling/test_sampling.py",
    ),
    _mutant(
        "explains-the-wrong-state", "a miss names the latest state that was lost", "weft/cache/match.py",
        "position = max(lost)", "position = min(lost)",
        "tests/cache/test_manager.py",
    ),
    # -- cache -----------------------------------------------------------------------------------------------------
    _mutant(
        "match-leaves-nothing", "at least one token of a prompt is computed", "weft/cache/manager.py",
        "limit = min(prefix.num_tokens, len(tokens) - 1)", "limit = prefix.num_tokens", "tests/cache/test_manager.py",
    ),
    _mutant(
        "salt-ignored", "what is stored under one salt is found under no other", "weft/cache/manager.py",
        "return self.tree.match(tokens, salt)", "return self.tree.match(tokens)", "tests/cache/test_manager.py",
    ),
    _mutant(
        "in-flight-salt-ignored", "a request waits for no prefill under another salt", "weft/cache/state_plan.py",
        "lease.salt != match.salt or ", "", "tests/scheduler/test_prefix_reuse.py",
    ),
    _mutant(
        "reserve-ignored", "an admission leaves the running requests what they need", "weft/cache/leasing.py",
        "fits = needed + reserve_pages <=", "fits = needed <=", "tests/scheduler/test_progress.py",
    ),
    _mutant(
        "tail-of-shared-pages-written", "the tree's pages are never written", "weft/cache/leasing.py",
        "write_start=max(match.num_tokens, num_shared * self.spec.page_size)", "write_start=match.num_tokens",
        "tests/cache/test_manager.py", "tests/cache/test_manager_fuzz.py",
    ),
    _mutant(
        "fork-source-not-pinned", "a state that is to be copied is not evicted before", "weft/cache/leasing.py",
        "        if source is not None and is_fork:\n            self.tree.pin(source)\n", "",
        "tests/cache/test_manager.py",
    ),
    _mutant(
        "alone-and-stuck", "a request alone finds pages for its whole context", "weft/cache/manager.py",
        "if pages is None and len(self._leases) == 1 and", "if False and", "tests/scheduler/test_progress.py",
    ),
    _mutant(
        "locks-what-others-brought", "a request locks only the pages that it reads", "weft/cache/insertion.py",
        "            break\n        node = each", "            pass\n        node = each",
        "tests/scheduler/test_progress.py",
    ),
    _mutant(
        "failed-is-remembered", "what a failing request stored is forgotten", "weft/cache/manager.py",
        "if not keep and cached and (node := ", "if False and (node := ", "tests/scheduler/test_prefix_reuse.py",
    ),
    _mutant(
        "tail-goes-past-a-state", "KV is evicted back to the last state, no further than is needed",
        "weft/cache/eviction.py", "self._tree.trim(leaf, max(inner, by_pages))", "self._tree.trim(leaf, inner)",
        "tests/cache/test_manager.py", "tests/cache/test_policy.py",
    ),
    _mutant(
        "split-page-not-pinned", "a page that two nodes list is pinned for both", "weft/cache/radix_tree.py",
        "            if node.locks:\n                self._pages.pin(kept[:1])\n", "",
        "tests/scheduler/test_prefix_reuse.py",
    ),
    _mutant(
        "boundaries-dropped", "states are stored at turn boundaries", "weft/cache/state_plan.py",
        "wanted += latest_first[1:]", "wanted += []", "tests/cache/test_policy.py",
    ),
    # -- scheduler -------------------------------------------------------------------------------------------------
    _mutant(
        "launched-past-its-length", "no step is launched past the last token", "weft/scheduler/scheduler.py",
        "if request.status is not RequestStatus.RUNNING or request.will_be_full:",
        "if request.status is not RequestStatus.RUNNING:",
        "tests/scheduler/test_scheduler.py",
    ),
    _mutant(
        "state-of-rejected-draft-read", "a step that follows another reads the state of the last accepted position",
        "weft/ops/drafts/__init__.py", "gather(1, query_len - 1 - behind)", "gather(1, query_len - 1 - 0 * behind)",
        "tests/speculation/test_following_steps.py",
    ),
    _mutant(
        "random-numbers-of-rejected-drafts", "a step that follows another samples by the positions that it has",
        "weft/ops/drafts/__init__.py", "(sample_positions.view(-1, query_len) - behind)",
        "(sample_positions.view(-1, query_len))", "tests/speculation/test_following_steps.py",
    ),
    _mutant(
        "oldest-never-first", "lpm lets the oldest go first every so often", "weft/scheduler/lookups.py",
        "oldest_first = step % LPM_WINDOW == 0", "oldest_first = False",
        "tests/scheduler/test_prefix_reuse.py",
    ),
    _mutant(
        "prompt-logprobs-twice", "a preempted request gives its prompt log probabilities once",
        "weft/scheduler/scheduler.py", "        request.prompt_logprobs.clear()\n", "",
        "tests/engine/test_preemption.py",
    ),
    _mutant(
        "first-is-preempted", "the last running request in policy order is preempted", "weft/scheduler/scheduler.py",
        "victim = self._rows.running[-1]", "victim = self._rows.running[0]", "tests/scheduler/test_prefix_reuse.py",
    ),
    _mutant(
        "stalls-unnoticed", "a preemption without progress is counted", "weft/scheduler/stalls.py",
        "if request.progress_when_preempted == self.num_new_tokens:", "if False:", "tests/scheduler/test_progress.py",
    ),
    _mutant(
        "failed-row-confirmed", "nothing of a failing step is inserted", "weft/scheduler/scheduler.py",
        "            if failed and exclusion is None:\n                running.failed = True\n            elif",
        "            if",
        "tests/scheduler/test_prefix_reuse.py",
    ),
    # -- runner and sampling ---------------------------------------------------------------------------------------
    _mutant(
        "row-keeps-pages", "a row starts with an empty page table", "weft/runner/rows.py",
        "        self._num_pages[row] = 0\n", "", "tests/runner/test_batch_builder.py",
    ),
    _mutant(
        "prefill-nan-unseen", "a prefill chunk that computed NaN fails", "weft/runner/results.py",
        ".isfinite().all(-1).logical_not()", ".isinf().any(-1)",
        "tests/engine/test_nan.py::test_what_a_failing_step_stored_is_matched_by_nobody",
    ),
    _mutant(
        "alternatives-of-others", "a request gets as many alternatives as it asked for", "weft/runner/results.py",
        "entry.token_ids[: top_n + 1], entry.logprobs[: top_n + 1]", "entry.token_ids, entry.logprobs",
        "tests/engine/test_logprobs.py",
    ),
    _mutant(
        "min-tokens-one-more", "an end is allowed after min_tokens", "weft/runner/sampling/state.py",
        "and count < p.min_tokens:", "and count <= p.min_tokens:", "tests/engine/test_sampling.py",
    ),
    _mutant(
        "penalties-forget-the-past", "a resumed request is penalised for what it generated before",
        "weft/runner/sampling/state.py", "output = new.token_ids[new.num_prompt_tokens :]", "output: list[int] = []",
        "tests/engine/test_preemption.py",
    ),
    _mutant(
        "bad-words-forget", "bad words are looked for in what was generated", "weft/runner/sampling/state.py",
        "torch.cat([words.recent[1:], token_ids[i : i + 1]])", "words.recent", "tests/engine/test_sampling.py",
    ),
    _mutant(
        "top-k-one-more", "top-k keeps k", "weft/ops/sampling/__init__.py",
        "within_k = (rank < top_k[:, None]) | ~has_k", "within_k = (rank <= top_k[:, None]) | ~has_k",
        "tests/ops/sampling/test_sampling.py",
    ),
    _mutant(
        "penalty-counts-the-prompt", "frequency counts what was generated", "weft/ops/sampling/__init__.py",
        "return logits.sub_(presence[:, None] * generated)",
        "return logits.sub_(presence[:, None] * (generated | prompt_mask))", "tests/ops/sampling/test_sampling.py",
    ),
    _mutant(
        "completions-share-a-seed", "each of n completions has a seed of its own", "weft/engine/input_processor.py",
        "return seed if index == 0 else derive_seed(seed, index)", "return seed", "tests/engine/test_sampling.py",
    ),
    # -- server ----------------------------------------------------------------------------------------------------
    _mutant(
        "queue-one-short", "the queue takes as many as it says", "weft/server/admission.py",
        "if num_open + count > self.limit:", "if num_open + count >= self.limit:",
        "tests/server/test_parts.py",
    ),
    _mutant(
        "left-twice", "a response that ends twice leaves once", "weft/server/admission.py",
        "            if not left:", "            if True:", "tests/server/test_parts.py",
    ),
    _mutant(
        "infinite-logprob", "no log probability is minus infinity, which JSON lacks", "weft/server/logprobs.py",
        "return max(value.logprob, LOWEST)", "return value.logprob", "tests/server/test_api.py",
    ),
    _mutant(
        "offsets-count-tokens", "text offsets count characters", "weft/server/logprobs.py",
        'offset += len(entry[chosen].decoded_token or "")', "offset += 1", "tests/server/test_api.py",
    ),
    _mutant(
        "cached-tokens-untold", "usage says how much of a prompt came from the cache", "weft/server/api_call.py",
        '"prompt_tokens_details": {"cached_tokens": cached}', '"prompt_tokens_details": {"cached_tokens": 0}',
        "tests/server/test_model.py::test_it_answers_and_the_second_time_from_the_cache",
    ),
    _mutant(
        "markup-keeps-its-space", "whitespace beside markup belongs to it", "weft/server/output_parser.py",
        "text, self._buffer = self._buffer[:at].rstrip(),", "text, self._buffer = self._buffer[:at],",
        "tests/server/test_output_parser.py",
    ),
    # -- FP8 ---------------------------------------------------------------------------------------------------------
    _mutant(
        "input-scale-of-the-last-part", "parts of a merged layer share the largest static input scale",
        "weft/quantization/storage.py", "torch.fmax(self.value, new, out=self.value)", "self.value.copy_(new)",
        "tests/quantization/test_loading.py",
    ),
    _mutant(
        "one-number-for-the-first-rows", "a scale of a whole tensor goes to all its rows",
        "weft/quantization/storage.py",
        "copies = tuple((everything, scale[run.target_rows]) for run in rows.runs)",
        "copies = tuple((everything, scale[run.target : run.target + run.count // 2]) for run in rows.runs)",
        "tests/quantization/test_loading.py", "tests/quantization/test_parity.py",
    ),
    _mutant(
        "torn-blocks-pass", "shards that tear blocks of a scale are refused", "weft/quantization/storage.py",
        "if run.source % BLOCK or run.target % BLOCK or (run.count % BLOCK and not is_end):", "if False:",
        "tests/quantization/test_loading.py",
    ),
    _mutant(
        "static-scale-unused", "inputs with a static scale are quantised by it", "weft/quantization/fp8.py",
        """            _optional(layer, "input_scale"),
            _optional(layer, "plain_weight"),""",
        """            None,
            _optional(layer, "plain_weight"),""",
        "tests/quantization/test_parity.py",
    ),
    _mutant(
        "experts-scale-unused", "experts with a static input scale are quantised by it", "weft/quantization/fp8.py",
        '_optional(experts, f"{name}_input_scale"), block)', "None, block)",
        "tests/quantization/test_parity.py",
    ),
    _mutant(
        "plain-rows-moved", "parts that are not quantised are rows of their own matrix",
        "weft/quantization/quantized.py", "rows.moved(weight.shape[0] - shard.rows)",
        "rows.moved(1 + weight.shape[0] - shard.rows)", "tests/quantization/test_loading.py",
        "tests/quantization/test_parity.py",
    ),
    _mutant(
        "cache-scale-unused", "an FP8 cache has the checkpoint's scales", "weft/layers/attention.py",
        'return cache["k"].dtype is E4M3 and self.k_scale is not None', "return False",
        "tests/quantization/test_kv_cache.py", "tests/quantization/test_loading.py",
    ),
    # -- several ranks -----------------------------------------------------------------------------------------------
    _mutant(
        "gathered-backwards", "parts of the vocabulary come in rank order", "weft/parallel/process_group.py",
        "torch.cat(parts.chunk(size), dim=-1)", "torch.cat(parts.chunk(size)[::-1], dim=-1)",
        "tests/executor/test_tensor_parallel.py::test_ranks_generate_what_one_generates",
    ),
    _mutant(
        "wrong-head-replicated", "neighbouring ranks hold the same replicated head", "weft/config/sharding.py",
        "head = rank * num_heads // size", "head = rank % num_heads",
        "tests/executor/test_tensor_parallel.py", "tests/layers/test_tensor_parallel.py",
    ),
    _mutant(
        "ring-overwrites", "a writer waits for the slowest reader", "weft/executor/ring.py",
        "while self._sequence - self._least_taken() >= NUM_SLOTS:",
        "while self._sequence - self._least_taken() >= NUM_SLOTS + 1:",
        "tests/executor/test_ring.py::test_a_full_ring_waits_and_asks_whether_waiting_is_in_vain",
    ),
    _mutant(
        "ring-asks-one-reader", "a writer waits for every reader", "weft/executor/ring.py",
        "return min(self._memory.number(reader, _TAKEN) for reader in range(len(self._pipes)))",
        "return max(self._memory.number(reader, _TAKEN) for reader in range(len(self._pipes)))",
        "tests/executor/test_ring.py",
    ),
    _mutant(
        "own-budget", "ranks agree on the smallest budget", "weft/runner/memory_plan.py",
        "plan_for(runner.config, runner.spec, runner.tp.least(_budget_of_all(runner)))",
        "plan_for(runner.config, runner.spec, _budget_of_all(runner))",
        "tests/runner/test_memory.py::test_the_plan_is_that_of_the_rank_with_the_least_memory",
    ),
    # -- replicas ----------------------------------------------------------------------------------------------------
    _mutant(
        "dead-replica-chosen", "a replica that is down gets no request", "weft/engine/router.py",
        "self.replicas[index].is_up = False", "self.replicas[index].num_open = 0", "tests/engine/test_router.py",
    ),
    _mutant(
        "ended-counts-on", "completions that have ended do not count as load", "weft/engine/router.py",
        "self.replicas[index].num_open -= 1", "self.replicas[index].num_open -= 0", "tests/engine/test_router.py",
    ),
    _mutant(
        "cache-outlives-its-replica", "a replica starts with nothing cached", "weft/engine/router.py",
        "self.replicas[index] = Replica(is_up=True)", "self.replicas[index].is_up = True",
        "tests/engine/test_router.py",
    ),
    _mutant(
        "sent-for-ever", "what was sent counts as cached for a while only", "weft/engine/router.py",
        "in self.sent.items() if moment > self.sent_since}", "in self.sent.items()}",
        "tests/engine/test_router.py",
    ),
    _mutant(
        "full-replica-preferred", "a replica that is full lets requests wait", "weft/engine/router.py",
        "if num_open >= self.max_num_seqs else cost", "if num_open > 2 * self.max_num_seqs else cost",
        "tests/engine/test_router.py",
    ),
    _mutant(
        "seen-requests-start-again", "a request of which tokens were seen is not run again", "weft/engine/replicas.py",
        "            if entry.is_seen:", "            if False:", "tests/server/test_replicas.py",
    ),
    _mutant(
        "longest-context-told", "the set takes what its smallest replica takes", "weft/engine/replicas.py",
        "max_model_len=min(c.max_model_len for c in known)", "max_model_len=max(c.max_model_len for c in known)",
        "tests/server/test_replicas.py::test_the_set_takes_what_every_replica_takes",
    ),
    _mutant(
        "gpus-shared", "no two replicas use one GPU", "weft/engine/gpus.py",
        "gpus[index * size : (index + 1) * size]", "gpus[index : index + size]", "tests/server/test_replicas.py",
    ),
    # -- server, again -----------------------------------------------------------------------------------------------
    _mutant(
        "several-hosts", "a request with two Host headers is refused", "weft/server/authentication.py",
        "        if num_hosts > 1:", "        if num_hosts > 2:",
        "tests/server/test_api.py", "tests/server/test_parts.py",
        "tests/server/test_connections.py",
    ),
    _mutant(
        "foreign-pages-post", "other sites' pages cannot use an open server", "weft/server/authentication.py",
        'if method == "POST" and not self._keys and not is_own:',
        'if method == "PUT" and not self._keys and not is_own:',
        "tests/server/test_api.py", "tests/server/test_parts.py",
    ),
    _mutant(
        "sums-replaced", "metrics of several API processes add up", "weft/server/request_metrics.py",
        "self.sums[name] += other.sums[name]", "self.sums[name] = other.sums[name]", "tests/server/test_parts.py",
        "tests/server/test_api_servers.py",
    ),
    _mutant(
        "top-logprobs-alone", "top_logprobs without logprobs is refused", "weft/server/sampling.py",
        "if request.top_logprobs is not None and not request.logprobs:", "if False:", "tests/server/test_parts.py",
        "tests/server/test_api.py", "tests/server/test_vllm_shapes.py",
    ),
    # -- found by the fuzzer, and what came with it ------------------------------------------------------------------
    _mutant(
        "step-left-behind", "the last request to end frees what its last step held", "weft/engine/llm.py",
        """        output = self._abort(request_id)
        self._drain_if_finished()""",
        "        output = self._abort(request_id)",
        "tests/engine/test_llm.py::test_the_last_request_leaves_nothing_behind",
    ),
    _mutant(
        "clamped-step-unknown", "no step is larger than the device has memory for", "weft/engine/core.py",
        "self.plan.max_num_batched_tokens or config.max_num_batched_tokens", "config.max_num_batched_tokens",
        "tests/runner/test_memory.py",
    ),
    _mutant(
        "wrappers-stay", "names are wrapped during the capture alone", "weft/pieces/named_splits.py",
        "stack.callback(target.put(self._wrapper(target)))", "target.put(self._wrapper(target))",
        "tests/pieces/test_model_compiler.py::test_names_are_wrapped_during_the_capture_alone",
    ),
    _mutant(
        "inner-calls-counted", "calls inside a split op are not split off again", "weft/pieces/named_splits.py",
        "        if self._depth == 0:", "        if True:",
        "tests/pieces/test_model_compiler.py::test_names_are_wrapped_during_the_capture_alone",
    ),
    # -- between rooms -----------------------------------------------------------------------------------------------
    _mutant(
        "rejected-drafts-committed", "rejected drafts are not tokens that were fed", "weft/cache/draft_slots.py",
        "lease.num_committed_tokens -= num_drafts - num_accepted", "lease.num_committed_tokens -= 0",
        "tests/cache/test_draft_states.py", "tests/speculation/test_traffic.py",
    ),
    _mutant(
        "state-after-all-drafts", "the state is the one after the last accepted draft", "weft/cache/draft_slots.py",
        "lease.drafts.accept(num_accepted)", "lease.drafts.settle(num_drafts)",
        "tests/cache/test_draft_states.py", "tests/speculation/test_traffic.py",
    ),
    _mutant(
        "snapshot-past-a-rejection", "a snapshot of rejected tokens is not kept", "weft/cache/draft_slots.py",
        "if snapshot is not None and snapshot[0] == lease.num_committed_tokens:", "if snapshot is not None:",
        "tests/cache/test_draft_states.py",
    ),
    _mutant(
        "drafts-past-the-context", "no draft stands behind the longest context", "weft/scheduler/draft_planner.py",
        "return min(limit, self.max_model_len - start - 1)", "return min(limit, self.max_model_len - start)",
        "tests/speculation/test_traffic.py",
    ),
    _mutant(
        "second-run-keeps-placeholders", "every run of an item's placeholders has its id in the cache's keys",
        "weft/multimodal/items.py", "for offset, length in item.placeholders:\n            keys",
        "for offset, length in item.placeholders[:1]:\n            keys",
        "tests/multimodal/test_media.py",
    ),
    _mutant(
        "shapes-share-a-hash", "images of the same pixels in another shape are others",
        "weft/multimodal/patch_maker.py", 'f"image {image.size} {self.settings}', 'f"image {self.settings}',
        "tests/multimodal/test_processor.py",
    ),
    _mutant(
        "chunk-takes-first-rows", "a chunk that begins inside an image takes its own rows",
        "weft/scheduler/encoder_cache.py", "row + low - offset", "row",
        "tests/scheduler/test_encoder_cache.py",
    ),
    _mutant(
        "image-in-use-evicted", "rows of an image that a step reads are given to no other in it",
        "weft/scheduler/encoder_cache.py",
        "            if key not in self._in_use:\n                del", "            if True:\n                del",
        "tests/scheduler/test_encoder_cache.py",
    ),
    _mutant(
        "padding-keeps-old-slots", "padding of a mixed batch decodes in slot 0", "weft/runner/batch_builder.py",
        '["state_slots"][: real.num_decodes], size)', '["state_slots"][: real.num_decodes], 0)',
        "tests/runner/test_padding.py",
    ),
    _mutant(
        "padding-verifies-in-old-slots", "padding sequences of a verification write to slot 0",
        "weft/runner/batch_builder.py",
        'self._put("verify_slots", slots, padded.num_tokens)', 'self._put("verify_slots", slots, len(slots))',
        "tests/runner/test_padding.py",
    ),
    _mutant(
        "padding-follows", "padding sequences follow no step", "weft/runner/batch_builder.py",
        "[r.follows for r in requests], padded.num_seqs)", "[r.follows for r in requests], 0)",
        "tests/runner/test_padding.py",
    ),
    _mutant(
        "padded-vocabulary-sampled", "tokens that pad the vocabulary of several ranks are never sampled",
        "weft/layers/embedding.py", "self._tp.all_gather(logits)[..., : self._vocab_size]",
        "self._tp.all_gather(logits)", "tests/layers/test_tensor_parallel.py",
    ),
    _mutant(
        "blocks-not-pushed", "every protocol sends a step's tokens in one pass", "weft/server/response_builder.py",
        "error_events, call.headers, pushed)", "error_events, call.headers)",
        "tests/server/test_pushed_tokens.py",
    ),
    _mutant(
        "other-arguments-pass", "a call split off by name is given the same as when it was found",
        "weft/pieces/named_splits.py", "            if other is not None:\n", "            if False:\n",
        "tests/pieces/test_model_compiler.py::test_a_call_that_is_given_something_else_for_few_rows_is_refused",
    ),
    *BETWEEN_ROOMS,
    *STEPS_AND_IMAGES,
    *SLICES_AND_BLOCKS,
    *ROWS_AND_RESPONSES,
    *DOORS,
    *HEADS_AND_SCALES,
    *EXPERTS_IN_BLOCKS,
    *DECAYS_AS_PRODUCTS,
    *EXPANDED_LATENTS,
    *SETTINGS_AND_ENDS,
    *SETTINGS_AND_REUSE,
    *TIERS,
    *CONFIGS_AND_WEIGHTS,
    *BLOCK_RESIDUALS,
    *CHAINED_HEADS,
    *CONVOLUTIONAL_ATTENTION,
    *DETERMINISM,
    *FIELDS_AND_FIGURES,
    *VERIFICATION,
    *MXFP8,
    *WAITS_AND_LEAKS,
)  # fmt: skip
