"""Bugs to plant where a flag, a field of a request or a figure is passed from one room to the next. Flags are passed to
settings and workloads, protocols to chats, and requests to metrics and logs."""

from __future__ import annotations

from tests.mutation.mutant import mutant

_TRANSLATIONS = "tests/server/test_translations.py"
_PROTOCOLS = "tests/server/test_other_protocols.py"
_ACCOUNTS = "tests/server/test_accounts.py"
_ARRIVALS = "tests/server/test_arrivals.py"
_LOAD = "tests/bench/test_serve.py"

FIELDS_AND_FIGURES = (
    mutant(
        "video-shapes-share-a-hash", "videos of equal patches in another shape are others",
        "weft/multimodal/patch_maker.py", 'f"video {grid} {self.settings}', 'f"video {self.settings}',
        "tests/multimodal/test_processor.py::test_videos_of_equal_patches_in_another_shape_are_others",
    ),
    mutant(
        "masks-end-at-a-refused-draft", "every draft has a mask, also behind one that the grammar refuses",
        "weft/engine/grammars.py", "(1 + len(drafts) - len(masks))", "(len(drafts) - len(masks))",
        "tests/engine/test_structured_outputs.py::test_masks_of_drafts",
    ),
    mutant(
        "drafts-stay-in-the-matcher", "masks of drafts leave the grammar where the text is",
        "weft/engine/grammars.py", "matcher.rollback(consumed)", "matcher.rollback(consumed - 1)",
        "tests/engine/test_structured_outputs.py::test_masks_of_drafts",
    ),
    mutant(
        "responses-drop-temperature", "a response's temperature is sampled with", "weft/server/responses.py",
        "        temperature=request.temperature,\n", "", _TRANSLATIONS,
    ),
    mutant(
        "responses-drop-instructions", "instructions are the system message", "weft/server/responses.py",
        "    if request.instructions:\n", "    if False:\n", _TRANSLATIONS,
    ),
    mutant(
        "responses-drop-parallel", "parallel_tool_calls of a response counts", "weft/server/responses.py",
        "        parallel_tool_calls=request.parallel_tool_calls,\n", "", _TRANSLATIONS,
    ),
    mutant(
        "responses-drop-formats", "text.format of a response constrains it", "weft/server/responses.py",
        "        response_format=_format((request.text or TextOptions()).format),\n", "", _TRANSLATIONS,
    ),
    mutant(
        "calls-lose-their-answers", "a call's output names the call", "weft/server/responses.py",
        '"tool_call_id": item.get("call_id"), "content": output', '"tool_call_id": None, "content": output',
        _TRANSLATIONS,
    ),
    mutant(
        "calls-stand-alone", "calls belong to the assistant's message before them", "weft/server/responses.py",
        "_assistant(messages, with_calls=True)", "_assistant(messages)", _TRANSLATIONS,
    ),
    mutant(
        "events-of-no-item", "an event says of which item it is", "weft/server/responses.py",
        'where = {"item_id": self._id(block), "output_index": index}', 'where = {"item_id": "", "output_index": index}',
        _PROTOCOLS,
    ),
    mutant(
        "parts-unannounced", "a text's part is announced before its deltas", "weft/server/responses.py",
        '            if block.kind == "text":\n                yield self._event("response.content_part.added"',
        '            if False:\n                yield self._event("response.content_part.added"', _PROTOCOLS,
    ),
    mutant(
        "response-forgets-what-was-asked", "a response repeats what was asked", "weft/server/responses.py",
        '"max_output_tokens": request.max_output_tokens,', '"max_output_tokens": None,', _PROTOCOLS,
    ),
    mutant(
        "messages-swap-stop", "stop_sequences of a message are its stop strings", "weft/server/anthropic_messages.py",
        "request.max_tokens, request.stop_sequences", "request.max_tokens, None", _TRANSLATIONS,
    ),
    mutant(
        "messages-swap-top", "top_p and top_k of a message are its own", "weft/server/anthropic_messages.py",
        "chat.temperature, chat.top_p, chat.top_k =", "chat.temperature, chat.top_k, chat.top_p =", _TRANSLATIONS,
    ),
    mutant(
        "template-loses-to-thinking", "chat_template_kwargs of a message go before what thinking implies",
        "weft/server/anthropic_messages.py", "thinks | (chat.chat_template_kwargs or {})",
        "(chat.chat_template_kwargs or {}) | thinks", _TRANSLATIONS,
    ),
    mutant(
        "cache-dtype-of-the-model", "the metric of the cache's settings has its dtype", "weft/server/metrics.py",
        '"cache_dtype": config.kv_cache_dtype,', '"cache_dtype": config.dtype,', _ACCOUNTS,
    ),
    mutant(
        "free-pages-for-cached", "each pool's figure has its own name", "weft/server/metrics.py",
        '"KV pages kept for reuse only", stats.num_evictable_pages', '"KV pages kept for reuse only", '
        "stats.num_free_pages", _ACCOUNTS,
    ),
    mutant(
        "padding-counted-as-decode", "each kind of token is counted under its name", "weft/server/metrics.py",
        '"decode": stats.num_decode_tokens,', '"decode": stats.num_padding_tokens,', _ACCOUNTS,
    ),
    mutant(
        "decode-time-for-inference", "the inference time begins with the first schedule",
        "weft/server/request_metrics.py",
        '"request_inference_time_seconds", times.finished - times.first_scheduled',
        '"request_inference_time_seconds", times.finished - (times.first_token or 0)', _ACCOUNTS,
    ),
    mutant(
        "hits-counted-as-queries", "hits of the prefix cache are cached tokens", "weft/server/request_metrics.py",
        'counters["prefix_cache_hits"] += request.num_cached_tokens',
        'counters["prefix_cache_hits"] += request.num_prompt_tokens', _ACCOUNTS,
    ),
    mutant(
        "log-counts-prompts-by-completion", "a prompt with several completions is logged once",
        "weft/server/requestlog.py", "[o.requests[0] for o in stream.outputs]", "requests", _ACCOUNTS,
    ),
    mutant(
        "log-without-the-first-token", "a call's line has the time to its first token", "weft/server/requestlog.py",
        '"ttft_s": _since(times.arrival, times.first_token)', '"ttft_s": None', _ACCOUNTS,
    ),
    mutant(
        "engine-log-is-text", "the engine logs in the server's format", "weft/server/main.py",
        "engine_module, verbose, as_json)", "engine_module, verbose)", "tests/server/test_parts.py",
    ),
    mutant(
        "serve-is-never-verbose", "--verbose reaches the server", "weft/cli/serve.py",
        "serve_engine_settings(args), verbose=args.verbose)", "serve_engine_settings(args))",
        "tests/server/test_parts.py",
    ),
    mutant(
        "load-ignores-extra-body", "--extra-body is in every request", "weft/bench/serve.py",
        "msgspec.json.encode(body | workload.extra_body)", "msgspec.json.encode(body)", _LOAD,
    ),
    mutant(
        "load-is-greedy", "--temperature reaches the load", "weft/cli/bench_serve.py",
        "        temperature=args.temperature,\n", "", _LOAD,
    ),
    mutant(
        "turns-forget-answers", "a question follows the answer before it", "weft/bench/serve.py",
        '{"role": "assistant", "content": outcome.text}', '{"role": "assistant", "content": ""}', _LOAD,
    ),
    mutant(
        "scaling-repeats-as-usual", "--repeats reaches the benchmark", "weft/cli/bench_scaling.py",
        "args.prompt_len, args.output_len, args.repeats", "args.prompt_len, args.output_len",
        "tests/cli/test_bench.py",
    ),
    mutant(
        "latency-is-greedy", "a batch is sampled at the workload's temperature", "weft/bench/latency.py",
        "temperature=workload.temperature, max_tokens=output_len", "temperature=0.0, max_tokens=output_len",
        "tests/cli/test_bench.py",
    ),
    mutant(
        "parts-stay-open", "a part that was announced is closed", "weft/server/responses.py",
        '            if block.kind == "text":\n                part = _part(block, block.text)',
        "            if False:\n                part = _part(block, block.text)", _PROTOCOLS,
    ),
    mutant(
        "completions-drop-positions", "checkpoint_positions of a completion count", "weft/server/completions.py",
        '"checkpoint_positions": request.checkpoint_positions}', '"checkpoint_positions": None}', _ARRIVALS,
    ),
    mutant(
        "completions-with-special-tokens", "add_special_tokens=false adds none", "weft/server/completions.py",
        "if isinstance(prompt, str) and not special:", "if False:", _ARRIVALS,
    ),
    mutant(
        "old-limit-goes-first", "max_completion_tokens goes before max_tokens", "weft/server/sampling.py",
        '("max_tokens", "max_completion_tokens")', '("max_completion_tokens", "max_tokens")', _ARRIVALS,
    ),
    mutant(
        "one-completion-fewer", "max_n completions are allowed", "weft/server/sampling.py",
        "request.n > settings.max_n", "request.n >= settings.max_n", _ARRIVALS,
    ),
    mutant(
        "accepted-stay-in-the-engine", "how many drafts were accepted reaches the caller", "weft/engine/process.py",
        "            num_accepted_tokens=request.num_accepted_tokens,\n", "", "tests/server/test_async_engine.py",
    ),
    mutant(
        "verifications-are-prompts", "sequences that verify drafts are decodes in the inspector",
        "weft/engine/inspection.py", "num_decodes=num_decodes + len(verifying)", "num_decodes=num_decodes",
        "tests/engine/test_inspection.py",
    ),
    mutant(
        "foreign-salts-shown", "a request's path is under its own salt", "weft/engine/inspection.py",
        "tree.match(as_tokens(keys), request.cache_salt)", "tree.match(as_tokens(keys))",
        "tests/engine/test_inspection.py",
    ),
    mutant(
        "ranks-log-text", "ranks log in this process's format", "weft/executor/multi_process.py",
        "verbose=_is_verbose(), log_json=logs_json())", "verbose=_is_verbose())",
        "tests/executor/test_multi_process.py",
    ),
    mutant(
        "lines-drop-variables", "chat_template_kwargs of a line reach its template", "weft/cli/generate.py",
        "job.messages, job.tools, job.chat_template_kwargs", "job.messages, job.tools", "tests/cli/test_generate.py",
    ),
    mutant(
        "reset-forgets-the-system", "/reset keeps the system message", "weft/cli/chat.py",
        '            elif text == "/reset":\n                self._reset()',
        '            elif text == "/reset":\n                self._messages = []', "tests/cli/test_chat.py",
    ),
    mutant(
        "grammars-untried", "a grammar is tried before the engine gets it", "weft/server/api_call.py",
        "            await service.grammars.check(grammar, constraint.param)\n", "", _ARRIVALS,
    ),
    mutant(
        "grammar-forgets-reasoning", "a constraint begins behind reasoning that the template has opened",
        "weft/server/api_call.py", "end_of_reasoning(need_tokenizer(engine)) if in_reasoning else None", "None",
        _ARRIVALS,
    ),
    mutant(
        "chats-drop-variables", "chat_template_kwargs reach the template", "weft/server/chat_completions.py",
        "tools.shown, _template_kwargs(request), ", "tools.shown, None, ", _ARRIVALS,
    ),
    mutant(
        "first-constraint-wins", "two constraints exclude each other", "weft/server/structured.py",
        "    if len(found) > 1:\n", "    if False:\n", _ARRIVALS,
    ),
    mutant(
        "load-comes-at-once", "conversations begin at their rate", "weft/bench/serve.py",
        "max(0.0, conversation.start_s - (time.perf_counter() - began))", "0.0", _LOAD,
    ),
    mutant(
        "columns-swapped", "each figure of a load stands under its heading", "weft/cli/bench_serve.py",
        'for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")',
        'for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")', _LOAD,
    ),
    mutant(
        "percentiles-forget-buckets", "a percentile counts all that lies below it", "weft/server/history.py",
        "            seen += self[bucket]\n", "            seen = self[bucket]\n", "tests/server/test_history.py",
    ),
    mutant(
        "intervals-forget-who-waits", "an interval has the most that waited in it", "weft/server/history.py",
        "        interval.num_waiting = max(interval.num_waiting, stats.num_waiting)\n", "",
        "tests/server/test_history.py",
    ),
    mutant(
        "spans-swap-penalties", "a span has each penalty under its name", "weft/server/tracing.py",
        '"gen_ai.request.frequency_penalty": params.frequency_penalty',
        '"gen_ai.request.frequency_penalty": params.presence_penalty', "tests/server/test_tracing.py",
    ),
    mutant(
        "padding-is-told-as-room", "an engine tells the pages that requests can get", "weft/engine/process.py",
        "num_pages=plan.num_pages - 1,", "num_pages=plan.num_pages,", "tests/server/test_async_engine.py",
    ),
    mutant(
        "strangers-have-a-name", "a key that is none of ours names nobody", "weft/server/authentication.py",
        "identity_of(given) if given is not None and is_known else None",
        "identity_of(given) if given is not None else None", "tests/server/test_parts.py",
    ),
    mutant(
        "preflights-reach-the-application", "a browser's question about an origin is answered by the gate",
        "weft/server/authentication.py", 'if is_let_in and scope["method"] == "OPTIONS":',
        'if not is_let_in and scope["method"] == "OPTIONS":', "tests/server/test_parts.py",
    ),
    mutant(
        "callers-name-metrics", "a path that a caller made up is no label", "weft/server/authentication.py",
        'scope["path"] if scope["path"] in self._routes else "other"', 'scope["path"]', "tests/server/test_parts.py",
    ),
    mutant(
        "errors-lose-their-field", "an error names the field that is to blame", "weft/server/errors.py",
        '"param": error.param, "code": error.code', '"param": None, "code": error.code', "tests/server/test_parts.py",
    ),
    mutant(
        "second-call-passes", "parallel_tool_calls=false leaves one call", "weft/server/output_parser.py",
        "elif self._several or not self.num_calls:", "else:", "tests/server/test_output_parser.py",
    ),
    mutant(
        "readers-wait-for-more", "what came before a reader is read without a wait", "weft/engine/response_stream.py",
        "            if not self._undelivered and not self._has_updates:\n", "            if not self._undelivered:\n",
        "tests/server/test_async_engine.py",
    ),
    mutant(
        "rates-of-traces-pass", "a rate beside a trace is refused", "weft/cli/bench_serve.py",
        "if args.trace is not None and rate is not None:", "if False:", _LOAD,
    ),
    mutant(
        "sleepers-are-not-woken", "a rank that sleeps is woken by a step", "weft/executor/ring.py",
        '                    os.write(write_end, b"\\0")\n', "                    pass\n",
        "tests/executor/test_ring.py::test_a_reader_that_sleeps_is_woken",
    ),
)  # fmt: skip
