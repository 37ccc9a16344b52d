"""Bugs to plant where a setting, an option of a request, or its end has to arrive: requests in order, broken and last
steps, calls, replicas, rows, captures."""

from __future__ import annotations

from tests.mutation.mutant import mutant

SETTINGS_AND_ENDS = (
    mutant(
        "running-unsorted", "the last running request in policy order is preempted, whenever it came",
        "weft/scheduler/running.py", "        self.running.sort(key=lambda r: sort_key(self._policy, r.request))\n",
        "", "tests/scheduler/test_scheduler.py::test_the_last_in_policy_order_makes_room_whenever_it_came",
    ),
    mutant(
        "resumed-outputs-are-prompt", "a resumed request stores the state at the end of its prompt",
        "weft/scheduler/scheduler.py", "num_prompt_tokens=request.num_prompt_tokens,",
        "num_prompt_tokens=request.num_tokens,",
        "tests/scheduler/test_prefix_reuse.py::test_a_resumed_request_stores_the_state_at_the_end_of_its_prompt",
    ),
    mutant(
        "lookup-kept-on-abort", "nothing is remembered of a request that does not wait any more",
        "weft/scheduler/scheduler.py",
        ("            self._waiting.remove(request)\n            self._lookups.remove(request)\n           "
         " self._end(request)"),
        "            self._waiting.remove(request)\n            self._end(request)",
        "tests/scheduler/test_prefix_reuse.py",
    ),
    mutant(
        "lookup-kept-on-admission", "a resumed request is looked up with all its tokens",
        "weft/scheduler/scheduler.py",
        ("            self._waiting.remove(request)\n            self._lookups.remove(request)\n           "
         " running"),
        "            self._waiting.remove(request)\n            running", "tests/scheduler/test_prefix_reuse.py",
    ),
    mutant(
        "leaving-not-awaited", "the next turn finds what the last step of the turn before leaves",
        "weft/scheduler/scheduler.py",
        ("        if self._rows.leaving and not self._rows.running:\n            return None  # only ended requests "
         "are in flight: the tree gets their KV and states before the next turn\n"),
        "", "tests/scheduler/test_prefix_reuse.py::test_the_next_turn_finds_what_a_step_in_flight_leaves",
    ),
    mutant(
        "follow-starves-waiting", "who comes is admitted between steps that follow each other",
        "weft/scheduler/scheduler.py",
        "        if len(self._waiting) > num_blocked and self._rows.has_room:\n            return None\n", "",
        "tests/speculation/test_traffic.py::test_who_comes_is_admitted_between_steps_that_follow_each_other",
    ),
    mutant(
        "priority-ties-by-push", "requests of one priority go by arrival", "weft/scheduler/queue.py",
        "return (request.priority if policy == \"priority\" else 0, request.admission or 0, request.arrival)",
        "return (request.priority if policy == \"priority\" else 0, request.admission or 0, 0)",
        "tests/scheduler/test_queue.py", "tests/scheduler/test_scheduler.py",
    ),
    mutant(
        "awaits-any-match", "few shared tokens are not waited for", "weft/scheduler/lookups.py",
        "match.num_tokens + MIN_IN_FLIGHT_MATCH", "match.num_tokens + 1",
        "tests/scheduler/test_prefix_reuse.py::test_few_shared_tokens_are_not_waited_for",
    ),
    mutant(
        "core-drops-eviction", "the eviction policy is the one that was chosen", "weft/engine/core.py",
        "        eviction=config.eviction_policy,\n", "",
        "tests/engine/test_prefix_cache.py::test_the_eviction_policy_is_the_one_that_was_chosen",
    ),
    mutant(
        "core-max-seqs-of-config", "no more requests run than the device has memory for", "weft/engine/core.py",
        "max_num_seqs=self.plan.max_num_seqs,", "max_num_seqs=config.max_num_seqs,",
        "tests/runner/test_memory.py::test_a_start_with_too_many_requests_runs_fewer_at_a_time",
    ),
    mutant(
        "never-overlaps", "with overlap one step is in flight", "weft/engine/core.py",
        "1 if config.enable_overlap else 0", "0", "tests/engine/test_llm.py::test_with_overlap_one_step_is_in_flight",
    ),
    mutant(
        "grammars-not-dropped", "a dead engine ends what waits for its grammar", "weft/engine/core.py",
        "self._failures.end_all([output for output, _ in self._in_flight], self._grammars.drop())",
        "self._failures.end_all([output for output, _ in self._in_flight], [])",
        ("tests/engine/test_structured_outputs.py::test_a_dead_engine_ends_what_waits_for_its_grammar_or_"
         "its_turn"),
    ),
    mutant(
        "waiting-survive-death", "a dead engine ends what waits for its turn", "weft/engine/failures.py",
        ("        for request in self._scheduler.requests:\n            "
         "self._scheduler.finish(request.request_id, \"error\")\n            self._requests.append(request)\n"),
        "",
        ("tests/engine/test_structured_outputs.py::test_a_dead_engine_ends_what_waits_for_its_grammar_or_"
         "its_turn"),
    ),
    mutant(
        "broken-encodings-kept", "what a broken step was to encode is encoded again", "weft/engine/failures.py",
        ("        if self._scheduler.encoder is not None:\n            "
         "self._scheduler.encoder.discard(scheduler_output.encodings)\n"),
        "", "tests/engine/test_images.py::test_what_a_broken_step_was_to_encode_is_encoded_again",
    ),
    mutant(
        "failures-are-no-work", "the end of a request whose step broke is returned", "weft/engine/core.py",
        " or bool(self._failures)", "",
        "tests/engine/test_llm.py::test_an_interrupted_step_ends_its_requests_and_nothing_else",
    ),
    mutant(
        "pixels-kept", "a request that has ended keeps no pixels", "weft/scheduler/scheduler.py",
        "        request.drop_pixels()\n", "",
        "tests/engine/test_images.py::test_a_request_that_has_ended_keeps_no_pixels",
    ),
    mutant(
        "matcher-kept-on-abort", "an abort leaves no grammar behind", "weft/engine/grammars.py",
        "        self._matchers.pop(request_id, None)\n", "", "tests/engine/test_structured_outputs.py",
    ),
    mutant(
        "grammar-lru-fifo", "the grammar that was used longest ago is forgotten", "weft/engine/grammars.py",
        "            self._compiled.move_to_end(grammar)\n", "", "tests/engine/test_structured_outputs.py",
    ),
    mutant(
        "async-submit-drops-caller", "the fair order knows whose a call is", "weft/engine/async_engine.py",
        "resolved, priority, caller=caller)", "resolved, priority)",
        "tests/server/test_async_engine.py",
    ),
    mutant(
        "given-up-runs-on", "a completion that cannot go on ends in the engine too", "weft/engine/async_engine.py",
        ("            self._link.send(wire.FinishRequests([request.request_id]))\n        "
         "request.finish_reason = \"error\""),
        "            pass\n        request.finish_reason = \"error\"", "tests/server/test_async_engine.py",
    ),
    mutant(
        "resets-wait-for-the-dead", "a dead engine's resets end", "weft/engine/async_engine.py",
        "            *self._pending_resets,\n", "", "tests/server/test_async_engine.py",
    ),
    mutant(
        "stop-untimed", "a stop string has a moment", "weft/engine/async_engine.py",
        "            request.times.finished = time.monotonic()\n", "", "tests/server/test_async_engine.py",
    ),
    mutant(
        "cached-tokens-charged", "cached prompt tokens cost a caller nothing", "weft/scheduler/scheduler.py",
        "request.num_prompt_tokens - lease.num_cached_tokens)", "request.num_prompt_tokens)",
        "tests/engine/test_fair_admission.py",
    ),
    mutant(
        "broken-steps-add-up", "broken steps count in a row only", "weft/engine/process.py",
        ("        if any(request.finish_reason != \"error\" for request in changed):\n            "
         "self._broken_steps = 0\n"),
        "", "tests/server/test_async_engine.py",
    ),
    mutant(
        "outputs-uncharged", "output tokens are charged as they come", "weft/scheduler/scheduler.py",
        "            self._order.charge(caller, num_tokens)\n", "            pass\n",
        "tests/engine/test_fair_admission.py",
    ),
    mutant(
        "truncation-drops-salt", "a truncated prompt keeps its salt", "weft/engine/input_processor.py",
        "return PreparedPrompt(text, ids, positions, prompt.cache_salt)",
        "return PreparedPrompt(text, ids, positions)", "tests/engine/test_llm.py::test_what_a_truncated_prompt_keeps",
    ),
    mutant(
        "truncated-position-zero", "positions of a truncated prompt lie in it", "weft/engine/input_processor.py",
        "for position in prompt.checkpoint_positions if position > cut]",
        "for position in prompt.checkpoint_positions if position >= cut]",
        "tests/engine/test_llm.py::test_what_a_truncated_prompt_keeps",
    ),
    mutant(
        "default-min-p-lost", "min_p has the checkpoint's default", "weft/engine/sampling_resolver.py",
        "_first(params.min_p, defaults.min_p, 0.0)", "_first(params.min_p, 0.0)",
        "tests/engine/test_generation_config.py",
    ),
    mutant(
        "interrupt-leaves-a-step", "an interrupt leaves no step in flight", "weft/engine/llm.py",
        "                    self._abort(request_id)\n                self._drain()\n                raise",
        "                    self._abort(request_id)\n                raise",
        "tests/engine/test_llm.py::test_an_interrupt_leaves_no_step_in_flight",
    ),
    mutant(
        "interrupts-are-not-held", "an interrupt waits until a step is over", "weft/processes/interrupts.py",
        "        came.append((number, frame))", "        run(number, frame)",
        "tests/engine/test_llm.py::test_an_interrupt_waits_until_a_step_is_over",
    ),
    mutant(
        "ttft-of-the-first", "the first token of several completions is that of any", "weft/engine/output_processor.py",
        "min(first_tokens, default=None)", "first_tokens[0] if first_tokens else None",
        "tests/engine/test_output_processor.py",
    ),
    mutant(
        "e2e-of-the-first", "several completions end with the last one", "weft/engine/output_processor.py",
        "max(t.finished or start for t in times)", "times[0].finished or start",
        "tests/engine/test_output_processor.py",
    ),
    mutant(
        "prefilled-counts-cached", "cached tokens are not counted as computed", "weft/engine/output_processor.py",
        "return sum(r.num_prompt_tokens - (r.num_cached_tokens or 0) for r in started)",
        "return sum(r.num_prompt_tokens for r in started)", "tests/engine/test_output_processor.py",
    ),
    mutant(
        "gauges-stay-after-abort", "gauges fall after an abort though no step follows", "weft/engine/process.py",
        "        self._channel.send(wire.Outputs([], self._core.stats()))  # so", "        # so",
        "tests/server/test_async_engine.py",
    ),
    mutant(
        "refused-stays-open", "a request that the engine refused is not open", "weft/engine/process.py",
        "        self._sent.pop(request_id, None)\n        self._channel.send(wire.Outputs([wire.Update",
        "        self._channel.send(wire.Outputs([wire.Update", "tests/server/test_async_engine.py",
    ),
    mutant(
        "aborted-stay-loads", "requests that were ended do not count as load", "weft/engine/replicas.py",
        "                self._router.ended(entry.index)\n                by_replica", "                by_replica",
        "tests/server/test_replicas.py::test_the_end_of_a_request_reaches_its_replica_and_frees_its_place",
    ),
    mutant(
        "replica-finish-drops-reason", "a replica hears why a request ends", "weft/engine/replicas.py",
        "wire.FinishRequests(request_ids, message.reason)", "wire.FinishRequests(request_ids)",
        "tests/server/test_replicas.py::test_the_end_of_a_request_reaches_its_replica_and_frees_its_place",
    ),
    mutant(
        "router-drops-salt", "a router takes prompts of other salts for others, also through the set",
        "weft/engine/replicas.py", "self._router.choose(keys, message.cache_salt)", "self._router.choose(keys)",
        "tests/server/test_replicas.py::test_a_salted_prompt_goes_where_it_is_cached_under_its_salt",
    ),
    mutant(
        "stats-of-the-dead", "a replica that is started again has done nothing yet", "weft/engine/replicas.py",
        "member.capacity, member.failed, member.stats = None, None, EngineStats()",
        "member.capacity, member.failed = None, None",
        "tests/server/test_replicas.py::test_a_replica_that_is_started_again_has_done_nothing_yet",
    ),
    mutant(
        "restarts-forgotten-on-start", "how often a replica was started again is kept", "weft/engine/replicas.py",
        "Restarts(member.restarts.num)", "Restarts()",
        "tests/server/test_replicas.py::test_a_replica_that_is_started_again_has_done_nothing_yet",
    ),
    mutant(
        "dead-stay-loads", "a dead replica has nothing open", "weft/engine/replicas.py",
        "            self._router.ended(index)\n", "",
        "tests/server/test_replicas.py::test_a_dead_replica_has_nothing_open",
    ),
    mutant(
        "sampling-not-forgotten", "rows of nobody keep no histories", "weft/runner/step_runner.py",
        "            self.sampler.state.free_row(row)\n", "",
        "tests/engine/test_sampling.py::test_nothing_is_kept_of_what_ended_requests_asked_for",
    ),
    mutant(
        "rows-not-forgotten", "rows of nobody keep no positions", "weft/runner/step_runner.py",
        "            self.rows.free(row)\n", "",
        "tests/engine/test_images.py::test_a_request_that_has_ended_keeps_no_pixels",
    ),
    mutant(
        "rows-not-forgotten-at-fill", "a row's next request has no positions of images of the last",
        "weft/runner/rows.py", "        self.sampling[row] = params\n        self.free(row)\n",
        "        self.sampling[row] = params\n", "tests/runner/test_batch_builder.py",
    ),
    mutant(
        "grammar-over-allowed", "of what a grammar allows only allowed tokens come", "weft/runner/sampling/state.py",
        "        return b if a is None else a\n    return a & b",
        "        return b if a is None else a\n    return b",
        "tests/engine/test_structured_outputs.py::test_of_what_a_grammar_allows_only_allowed_tokens_come",
    ),
    mutant(
        "profiled-steps-drop-processors", "logits processors run while steps are profiled",
        "weft/executor/in_process.py", "self._runner.steps.launch(scheduler_output, processors))",
        "self._runner.steps.launch(scheduler_output))",
        "tests/engine/test_logits_processors.py::test_while_steps_are_profiled",
    ),
    mutant(
        "async-chat-drops-priority", "a chat's priority counts", "weft/engine/async_llm.py",
        "self.generate(prompt, sampling_params, request_id, priority)",
        "self.generate(prompt, sampling_params, request_id)", "tests/engine/test_async_llm.py::test_the_same_as_llm",
    ),
    mutant(
        "async-chat-drops-kwargs", "arguments of the chat template arrive", "weft/engine/async_llm.py",
        "TemplateOptions(tools, chat_template_kwargs, add", "TemplateOptions(tools, None, add",
        "tests/engine/test_async_llm.py::test_the_same_as_llm",
    ),
    mutant(
        "capture-collects-never", "captures leave the collector on where that is asked for",
        "weft/runner/model_runner.py", "            keep_gc=config.enable_cudagraph_gc,\n",
        "            keep_gc=False,\n", "tests/runner/test_step_graphs.py::test_settings_of_captures",
    ),
    mutant(
        "ranks-capture-alone", "all ranks capture the same sizes", "weft/runner/model_runner.py",
        "            least=self.tp.least,\n", "            least=lambda value: value,\n",
        "tests/runner/test_step_graphs.py::test_settings_of_captures",
    ),
    mutant(
        "budget-of-each-set", "all graphs share one budget", "weft/runner/step_graphs.py",
        "        budget -= found.counters.capture_bytes\n", "",
        "tests/runner/test_step_graphs.py::test_all_graphs_share_one_budget",
    ),
    mutant(
        "weights-of-seed-0", "dummy weights follow the seed", "weft/runner/model_runner.py",
        "config.load_format, config.seed)", "config.load_format, 0)",
        "tests/runner/test_memory.py::test_dummy_weights_follow_the_seed",
    ),
    mutant(
        "plan-drops-slots", "the number of state slots is the one that was given", "weft/cache/plan.py",
        "        num_state_slots=config.num_state_slots,\n", "        num_state_slots=None,\n",
        "tests/runner/test_memory.py::test_pools_are_what_the_settings_ask_for",
    ),
    mutant(
        "plan-drops-drafts", "states have room for drafts", "weft/cache/plan.py",
        "        num_drafts_at=config.num_drafts_at,\n", "        num_drafts_at=lambda n: 0,\n",
        "tests/runner/test_memory.py::test_pools_are_what_the_settings_ask_for",
    ),
    mutant(
        "head-not-remembered", "steps that follow verify what was drafted last", "weft/runner/drafting/drafters.py",
        "if acceptance is not None and self.rules.on_device:", "if False:",
        "tests/speculation/test_model_drafts.py::test_steps_that_follow_verify_what_was_drafted_last",
    ),
    mutant(
        "media-positions-of-step", "angles of images stand behind the model's context", "weft/runner/step_runner.py",
        "config.max_model_len) if media is not None else None,",
        "plan.max_model_len) if media is not None else None,",
        "tests/engine/test_images.py::test_in_a_context_shorter_than_the_models",
    ),
    mutant(
        "fp8-warning-silent", "a checkpoint without scales of its cache is told", "weft/runner/model_runner.py",
        "if config.kv_cache_dtype == \"fp8\" and not (quantization and quantization.kv_cache):",
        "if config.kv_cache_dtype == \"fp8\" and not quantization:",
        "tests/quantization/test_kv_cache.py::test_a_checkpoint_without_scales_is_told",
    ),
    mutant(
        "no-expert-parallel", "experts are split over ranks where that is set", "weft/runner/model_runner.py",
        "            expert_parallel=config.enable_expert_parallel,\n", "",
        "tests/runner/test_memory.py::test_what_layers_are_told",
    ),
    mutant(
        "images-drop-salt", "a prompt with images keeps its salt", "weft/engine/input_processor.py",
        "PreparedPrompt(prompt.text, expanded.token_ids, expanded.positions, prompt.cache_salt, expanded.media)",
        "PreparedPrompt(prompt.text, expanded.token_ids, expanded.positions, None, expanded.media)",
        "tests/engine/test_chat_prompts.py::test_a_prompt_with_images_keeps_its_salt_and_positions",
    ),
    mutant(
        "images-drop-positions", "a prompt with images keeps its positions", "weft/engine/input_processor.py",
        "self.with_media(prompt.token_ids, prompt.checkpoint_positions, processed, param)",
        "self.with_media(prompt.token_ids, [], processed, param)",
        "tests/engine/test_chat_prompts.py::test_a_prompt_with_images_keeps_its_salt_and_positions",
    ),
    mutant(
        "chat-drops-salt", "a chat keeps its salt", "weft/engine/input_processor.py",
        "PreparedPrompt(chat.text, chat.token_ids, known, cache_salt, chat.media)",
        "PreparedPrompt(chat.text, chat.token_ids, known, None, chat.media)",
        "tests/engine/test_chat_prompts.py::test_a_chat_keeps_its_salt_and_images_and_has_positions_of_its_own",
    ),
    mutant(
        "one-part-of-the-largest", "memory is measured with as much as a step encodes", "weft/runner/media_inputs.py",
        "[_PART] * whole + [rest] * (rest > 0)", "[_PART] * whole",
        "tests/engine/test_images.py::test_memory_is_measured_with_as_much_as_a_step_encodes",
    ),
    mutant(
        "moved-drops-a-moment", "every moment of an update moves with its clock", "weft/engine/wire.py",
        "for name in (\"first_scheduled\", \"first_token\", \"finished\")}",
        "for name in (\"first_scheduled\", \"first_token\")}", "tests/server/test_channel.py::test_another_clock",
    ),
    mutant(
        "words-remember-rejected", "rejected drafts are no beginning of a bad word", "weft/runner/sampling/state.py",
        "words.recent = recent if counted is None else torch.where(counted[i], recent, words.recent)",
        "words.recent = recent", "tests/runner/sampling/test_state.py",
    ),
)  # fmt: skip
