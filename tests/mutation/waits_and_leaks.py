"""Bugs to plant where a wait has no end, a socket, a thread or a place is left open, or a figure goes to the wrong row:
ranks, API processes, connections and streams, the engine's messages, and a step's arrays and results."""

from __future__ import annotations

from tests.mutation.mutant import mutant

_WORKERS, _RANK_TESTS = "weft/executor/workers.py", "tests/executor/test_workers.py"
_PROCESS = "weft/executor/rank_process.py"
_CHILD, _CHILD_TESTS = "weft/processes/child.py", "tests/processes/test_child.py"
_EXECUTOR, _EXECUTOR_TESTS = "weft/executor/multi_process.py", "tests/executor/test_multi_process.py"
_ENGINE, _LOOP, _ENGINE_TESTS = (
    "weft/engine/async_engine.py",
    "weft/engine/process.py",
    "tests/server/test_async_engine.py",
)
_API = "weft/server/api_servers.py"
_API_TESTS = (
    "tests/server/test_api_servers.py::test_what_is_open_is_known_of_what_the_engine_has_only",
    "tests/server/test_api_servers.py::test_an_api_process_that_ends_leaves_no_socket",
    "tests/server/test_api_servers.py::test_the_engine_hears_of_the_death_of_an_api_process",
)
_CONNECTIONS, _EVENTS = "weft/server/connections.py", "weft/server/sse.py"
_CALLS = "tests/server/test_connections.py::"
_CHECK, _CHECK_TESTS = "weft/server/grammar_check.py", "tests/server/test_structured.py"
_BATCH, _BATCH_TESTS = "weft/runner/batch_builder.py", "tests/runner/test_batch_builder.py"
_RESULTS, _RESULT_TESTS = "weft/runner/results.py", "tests/runner/test_results.py"
_SAMPLING, _SAMPLING_TESTS = "weft/runner/sampling/state.py", "tests/runner/sampling/test_state.py"

WAITS_AND_LEAKS = (
    # -- ranks -----------------------------------------------------------------------------------------------------
    mutant(
        "busy-ranks-hang", "a rank that computes does not hang", _WORKERS,
        "return now - max(beat, movement.at)", "return now - beat", _RANK_TESTS,
    ),
    mutant(
        "loading-ranks-hang", "a rank that loads its libraries does not hang", _WORKERS,
        "if not pid or now - beat", "if now - beat", _RANK_TESTS,
    ),
    mutant(
        "beats-of-the-next", "a rank's heartbeat is its own", _WORKERS,
        "self._ring.beats()[worker.rank - 1]", "self._ring.beats()[worker.rank - 2]", _RANK_TESTS,
    ),
    mutant(
        "survivors-run-on", "the end of one rank is the end of all", _WORKERS,
        '        logger.error("%s", self._failure)\n        self.kill()\n',
        '        logger.error("%s", self._failure)\n', _RANK_TESTS,
    ),
    mutant(
        "collectives-wait-for-the-dead", "nobody waits in a collective for a rank that is gone", _WORKERS,
        "        abort_groups()\n", "", _RANK_TESTS,
    ),
    mutant(
        "stragglers-stay", "ranks that do not leave are killed", _WORKERS,
        "            worker.wait(max(0.0, deadline - time.monotonic()))\n        self.end()\n",
        "            worker.wait(max(0.0, deadline - time.monotonic()))\n        self._watcher.join()\n", _RANK_TESTS,
    ),
    mutant(
        "grace-for-each", "all ranks together get one time to leave", _WORKERS,
        "worker.wait(max(0.0, deadline - time.monotonic()))", "worker.wait(_GRACE_S)", _RANK_TESTS,
    ),
    mutant(
        "consequences-are-causes", "the first failure is the one that is told", _WORKERS,
        "        if self.failure(wait_s) is None:\n            self._failure",
        "        if True:\n            self._failure", _RANK_TESTS,
    ),
    mutant(
        "starts-wait-for-the-dead", "a start does not wait for a rank that is gone", _WORKERS,
        "            self.check()\n            time.sleep(0.02)", "            time.sleep(0.02)", _RANK_TESTS,
    ),
    mutant(
        "leaving-fails", "the end of a rank that was asked to leave is no failure", _WORKERS,
        "        if self._is_stopping.is_set():\n            return\n        worker.kill()", "        worker.kill()",
        _RANK_TESTS,
    ),
    mutant(
        "watcher-outlives-the-ring", "nobody reads a ring that is closed", _WORKERS,
        "        self._watcher.join(_GRACE_S)\n", "", _RANK_TESTS, _EXECUTOR_TESTS,
    ),
    mutant(
        "faults-of-settings-are-deaths", "a rank's error about the settings is one here", _WORKERS,
        "ConfigError if worker.failed.user_error else EngineDeadError", "EngineDeadError", _RANK_TESTS,
    ),
    mutant(
        "reports-held-open", "a rank's reports end with it", _PROCESS, "        os.close(self._reports)\n", "",
        _RANK_TESTS,
    ),
    mutant(
        "ranks-stop-unread", "what a rank prints is read also where nobody reads it here", _CHILD,
        "with suppress(OSError, ValueError):  # without", "with suppress():  # without", _RANK_TESTS, _CHILD_TESTS,
    ),
    mutant(
        "ranks-are-zombies", "a killed rank's status is asked for", _CHILD,
        "        self.kill()\n        self._process.wait()\n", "        self.kill()\n", _RANK_TESTS, _CHILD_TESTS,
    ),
    mutant(
        "eight-ranks-start-late", "up to eight ranks are started early", _PROCESS,
        "not 1 < size <= _MOST_EARLY", "not 1 < size < _MOST_EARLY", _RANK_TESTS,
    ),
    mutant(
        "sibling-of-another", "a sibling is who its heartbeat says", _PROCESS,
        "return self._ring.beats()[self.rank - 1][0]", "return self._ring.beats()[self.rank - 2][0]", _RANK_TESTS,
    ),
    mutant(
        "ring-stays-open", "ranks that end give their ring back", _EXECUTOR,
        "        self._folder.cleanup()\n        self._ring.close()\n", "        self._folder.cleanup()\n",
        _EXECUTOR_TESTS,
    ),
    mutant(
        "refused-start-stays-open", "a start that is refused leaves nothing open", _EXECUTOR,
        "        except BaseException:\n            self._release()\n            raise\n",
        "        except BaseException:\n            raise\n", _EXECUTOR_TESTS,
    ),
    mutant(
        "dead-step-awaited", "a step beside a dead rank is not waited for", _EXECUTOR,
        "            self._workers.check()\n            time.sleep(_POLL_S)\n        return",
        "            time.sleep(_POLL_S)\n        return", _EXECUTOR_TESTS,
    ),
    mutant(
        "ranks-out-of-step", "a step that breaks on rank 0 ends all ranks", _EXECUTOR,
        'self._workers.fail(f"a step', '(lambda *_, **__: None)(f"a step', _EXECUTOR_TESTS,
    ),
    # -- API processes, connections, streams -------------------------------------------------------------------------
    mutant(
        "ended-requests-have-owners", "a request that has ended is nobody's", _API,
        "            if update.finish_reason is not None:\n                self._forget(update.request_id)\n", "",
        *_API_TESTS,
    ),
    mutant(
        "aborted-requests-have-owners", "a request that was aborted is nobody's", _API,
        "                for request_id in message.request_ids:\n                    self._forget(request_id)\n", "",
        *_API_TESTS,
    ),
    mutant(
        "requests-of-the-dead-engine", "what was meant for an engine that has died reaches no other", _API,
        "                if self._ready is not None:  # else", "                if True:  # else", *_API_TESTS,
    ),
    mutant(
        "owners-outlive-the-engine", "what a dead engine had is nobody's", _API,
        "        for request_id in list(self._owners):\n            self._forget(request_id)\n", "", *_API_TESTS,
    ),
    mutant(
        "links-of-the-dead-stay", "the link of a process that has ended is closed", _API,
        "            member.frames.close()\n            member.frames = None\n", "            member.frames = None\n",
        *_API_TESTS,
    ),
    mutant(
        "heads-add-up", "the limit is for each head of a connection", _CONNECTIONS,
        "        self._field_bytes = 0\n        self._arm()", "        self._arm()",
        _CALLS + "test_heads_do_not_add_up",
    ),
    mutant(
        "parts-of-heads-add-up", "heads that come in parts do not add up", _CONNECTIONS,
        "self._raw_bytes, self._is_in_body = 0, True", "self._is_in_body = True",
        _CALLS + "test_heads_do_not_add_up",
    ),
    mutant(
        "the-gone-make-room", "a connection that has gone makes no room a second time", _CONNECTIONS,
        "        self._disarm()\n        self._stop_lingering()\n        if self._unread",
        "        self._disarm()\n        if self._unread",
        _CALLS + "test_answered_requests_whose_rest_does_not_come_make_room_for_others",
    ),
    mutant(
        "one-connection-fewer", "as many connections as the limit says", _CONNECTIONS,
        "        if len(self.connections) > self.limit:\n", "        if len(self.connections) >= self.limit:\n",
        _CALLS + "test_the_last_connections_are_for_the_state",
    ),
    mutant(
        "crowded-one-early", "all but the last connections are for anybody", _CONNECTIONS,
        "self._is_crowded = len(self.connections) > self.limit - KEPT",
        "self._is_crowded = len(self.connections) >= self.limit - KEPT",
        _CALLS + "test_the_last_connections_are_for_the_state",
    ),
    mutant(
        "pipelined-callers-stay", "a caller with several requests in a row has gone for all of them", _CONNECTIONS,
        "            self._answering.disconnected = True  # uvicorn tells the last of several in a row only\n", "",
        _CALLS + "test_a_caller_that_has_gone_already_is_told_of",
    ),
    mutant(
        "gone-before-it-was-asked", "a caller that has gone before its handler runs is told of", _CONNECTIONS,
        "        if call is not None and self.transport.is_closing():\n            self.loop.call_soon(self._lost)\n",
        "", _CALLS + "test_a_caller_that_has_gone_already_is_told_of",
    ),
    mutant(
        "timers-outlive-calls", "a call's time ends with it", _EVENTS,
        "        self._timer.cancel()\n        self._on_disconnect(None)", "        self._on_disconnect(None)",
        _CALLS + "test_nothing_of_a_call_is_left_behind_it",
    ),
    mutant(
        "calls-outlive-themselves", "who leaves behind a call ends nothing", _EVENTS,
        "        self._timer.cancel()\n        self._on_disconnect(None)", "        self._timer.cancel()",
        _CALLS + "test_nothing_of_a_call_is_left_behind_it",
    ),
    mutant(
        "comments-outlive-calls", "a comment that nobody reads ends with its call", _EVENTS,
        "            sender.close()\n            self._close()", "            self._close()",
        _CALLS + "test_a_comment_that_is_not_read_ends_with_its_caller",
    ),
    mutant(
        "comments-pile-up", "a caller that does not read gets no further comments", _EVENTS,
        "if quiet_s >= PING_S and not self._is_busy:", "if quiet_s >= PING_S:",
        _CALLS + "test_a_caller_that_does_not_read_is_not_waited_for",
    ),
    mutant(
        "comment-behind-the-end", "no comment comes behind the last bytes", _EVENTS,
        "        self._is_busy = True\n        self.close()\n", "        self.close()\n",
        _CALLS + "test_a_caller_that_does_not_read_is_not_waited_for",
    ),
    mutant(
        "ends-wait-for-ever", "the end of a stream waits for its caller for a while only", _EVENTS,
        "        watch.allow(_END_TIMEOUT_S)\n        await sender.end(end)", "        await sender.end(end)",
        _CALLS + "test_a_caller_that_does_not_read_is_not_waited_for",
    ),
    mutant(
        "pushes-are-silence", "a stream whose tokens are pushed is not quiet", _EVENTS,
        "            self._chunks.write(content)\n            self._last = self._loop.time()\n",
        "            self._chunks.write(content)\n", _CALLS + "test_a_push_is_a_sign_of_life_and_waits_for_the_head",
    ),
    mutant(
        "tokens-before-the-head", "nothing is pushed before the head", _EVENTS,
        "if self._is_busy or not self.started or not self._chunks.is_free:",
        "if self._is_busy or not self._chunks.is_free:",
        _CALLS + "test_a_push_is_a_sign_of_life_and_waits_for_the_head",
    ),
    mutant(
        "answers-are-kept-for-ever", "answers about grammars are remembered up to a number", _CHECK,
        "            if len(self._answers) > _MAX_REMEMBERED:\n                self._answers.popitem(last=False)\n", "",
        _CHECK_TESTS,
    ),
    mutant(
        "latest-answer-forgotten", "the latest answers about grammars are remembered", _CHECK,
        "popitem(last=False)", "popitem()", _CHECK_TESTS,
    ),
    mutant(
        "busy-machine-blamed-on-callers", "a task that waits for a busy machine is no fault of its caller's",
        "weft/server/worker_pool.py", "            return ApiError(503, message,",
        "            return RequestError(message)\n            ApiError(503, message,",
        "tests/server/test_starved.py",
    ),
    # -- the engine's messages ---------------------------------------------------------------------------------------
    mutant(
        "places-forgotten-early", "callers who are ahead are remembered", "weft/scheduler/fair_order.py",
        "if used > self._time or name in open_ones}", "if name in open_ones}",
        "tests/scheduler/test_fair_order.py",
    ),
    mutant(
        "order-goes-back", "who comes now is placed behind all that was served", "weft/scheduler/fair_order.py",
        "self._time = max(self._time, self._used[caller])", "self._time = self._used[caller]",
        "tests/scheduler/test_fair_order.py",
    ),
    mutant(
        "closed-streams-end-others", "a stream that is closed again ends no other one of its id", _ENGINE,
        "        if self._streams.get(stream.request_id) is not stream:\n",
        "        if stream.request_id not in self._streams:\n", _ENGINE_TESTS,
    ),
    mutant(
        "late-looks-break", "the answer to a look that nobody waits for is dropped", _ENGINE,
        "pending = self._inspections.get(message.number)\n        if pending is not None and not pending.done():",
        "pending = self._inspections.get(message.number)\n        if pending is not None:", _ENGINE_TESTS,
    ),
    mutant(
        "resets-swap-answers", "resets are answered in their order", _ENGINE,
        "self._pending_resets.pop(0)", "self._pending_resets.pop()", _ENGINE_TESTS,
    ),
    mutant(
        "log-probabilities-again", "log probabilities are sent once", _LOOP,
        "request.logprobs[num_tokens:] if", "request.logprobs if", _ENGINE_TESTS,
    ),
    mutant(
        "prefixes-all-the-time", "what is cached is told once a second at most", _LOOP,
        "self._prefixes_due = now + max(PREFIXES_EVERY_S, 100 * (now - began))", "self._prefixes_due = now",
        _ENGINE_TESTS,
    ),
    mutant(
        "old-prefixes-again", "what is cached is told where it has changed", _LOOP,
        "            self._prefixes_version = version\n", "", _ENGINE_TESTS,
    ),
    mutant(
        "deltas-bring-all", "a delta brings the log probabilities of its tokens", "weft/engine/output_processor.py",
        "completion.logprobs[start:] if", "completion.logprobs if", "tests/engine/test_output_processor.py",
    ),
    mutant(
        "ends-come-again", "the end of a completion comes once", "weft/engine/output_processor.py",
        "        completion.end_sent = request.finish_reason is not None\n", "",
        "tests/engine/test_output_processor.py",
    ),
    mutant(
        "sent-survives-a-reset", "a cache that was reset has nothing of what was sent", "weft/engine/router.py",
        "self.replicas[index].below, self.replicas[index].sent = set(), set(), {}",
        "self.replicas[index].below = set(), set()", "tests/engine/test_router.py",
    ),
    mutant(
        "seventeenth-message-waits", "all messages that are there are read", "weft/engine/channel.py",
        "            self._receiver(content)\n        self._loop.call_soon(self._read)\n",
        "            self._receiver(content)\n", "tests/server/test_channel.py",
    ),
    # -- a step ------------------------------------------------------------------------------------------------------
    mutant(
        "stored-pages-reach-the-next", "what is stored of one request says nothing of the next", _BATCH,
        "min(r.num_tokens, r.write_start - r.start)", "r.write_start - r.start", _BATCH_TESTS,
    ),
    mutant(
        "chunks-of-fewer-sequences", "all prefills of a step have chunks", _BATCH,
        "else shape.num_seqs - shape.num_decodes", "else shape.num_seqs - shape.num_decodes - 1", _BATCH_TESTS,
    ),
    mutant(
        "decodes-have-old-chunks", "decodes alone in a mixed batch have no chunk", _BATCH,
        "        first[: num_decodes + 1] = 0\n", "", "tests/runner/test_padding.py",
    ),
    mutant(
        "padding-has-an-old-top-p", "padding samples with no step's parameters", _BATCH,
        '("top_p", table.top_p, 1)', '("top_p", table.top_p, 0)', "tests/runner/test_padding.py",
    ),
    mutant(
        "drafts-of-who-does-not-sample", "drafts belong to the rows that sample", _RESULTS,
        "draft_rows=[r.row for r in requests if r.samples] if", "draft_rows=[r.row for r in requests] if",
        _RESULT_TESTS,
    ),
    mutant(
        "no-draft-is-a-draft", "a row for which nothing was found has no drafts", _RESULTS,
        "if ids and ids[0] != NO_DRAFT}", "if ids}", _RESULT_TESTS,
    ),
    mutant(
        "rejected-log-probabilities", "log probabilities are of the tokens that count", _RESULTS,
        "if self.counts_all or counted[place]:", "if True:", _RESULT_TESTS,
    ),
    mutant(
        "broken-prefill-of-another", "a prefill that fails is that of its row", _RESULTS,
        "prefill_rows=[r.row for r in requests if not r.samples],", "prefill_rows=[r.row for r in requests],",
        _RESULT_TESTS,
    ),
    mutant(
        "next-owner-gets-log-probabilities", "a row's next owner gets no log probabilities", _SAMPLING,
        "self._biases, self._ends, self._num_logprobs):", "self._biases, self._ends):", _SAMPLING_TESTS,
    ),
    mutant(
        "drafts-without-penalty", "drafts before a token are penalised", _SAMPLING,
        "        if counts is None or not drafts:\n", "        if True:\n", _SAMPLING_TESTS,
    ),
    mutant(
        "words-without-drafts", "drafts before a token begin bad words", _SAMPLING,
        "(words.after(self._ints(drafts)) if drafts else words).blocked()", "words.blocked()", _SAMPLING_TESTS,
    ),
    mutant(
        "mask-of-the-first-draft", "each position has its own mask", _SAMPLING,
        "masks[len(r.draft_token_ids)] if masks", "masks[0] if masks", _SAMPLING_TESTS,
    ),
)  # fmt: skip
