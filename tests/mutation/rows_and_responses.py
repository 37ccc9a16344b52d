"""Bugs to plant in rows and batches, drafters, images, responses, connections and API processes."""

from __future__ import annotations

from tests.mutation.mutant import mutant

ROWS_AND_RESPONSES = (
    mutant(
        "padding-repeats-a-last-row", "a padding row of results is no sequence's last", "weft/runner/logits_rows.py",
        "indices[count:size] = differ[0] if len(differ) else count", "indices[count:size] = indices[count - 1]",
        "tests/runner/test_logits_rows.py",
    ),
    mutant(
        "padding-not-sent", "a step is sent with its padding", "weft/runner/batch_builder.py",
        "self._buffers.upload(padded.num_tokens,", "self._buffers.upload(real.num_tokens,",
        "tests/runner/test_batch_builder.py",
    ),
    mutant(
        "verification-stores-no-states", "a step that stores other states is no plain verification",
        "weft/runner/drafting/step_drafts.py",
        " and len(r.checkpoints) == states for r in requests)", " for r in requests)",
        "tests/runner/test_batch_builder.py", "tests/speculation/test_states.py",
    ),
    mutant(
        "step-has-no-media", "a step with images is run as one", "weft/runner/step_layout.py",
        "may_have_media=self.reads_images and any(r.media for r in requests),", "may_have_media=False,",
        "tests/test_fuzz_engine.py::test_random_images", "tests/engine/test_images.py",
    ),
    mutant(
        "chained-copies", "copies of a step are all read before any is written", "weft/runner/cache_copies.py",
        "chained = not {s for s, _ in pairs}.isdisjoint(t for s, t in pairs if s != t)", "chained = False",
        "tests/runner/test_cache_copies.py",
    ),
    mutant(
        "graph-ignores-edits", "rows with edits are sampled again after a graph",
        "weft/runner/sampling/step_sampler.py",
        "if replayed is not None and not edited:", "if replayed is not None:",
        "tests/runner/sampling/test_step_sampler.py",
    ),
    mutant(
        "prompt-logprobs-stay", "a row's next request gets no log probabilities that it did not ask for",
        "weft/runner/rows.py", "        self.prompt_logprobs.pop(row, None)\n", "",
        "tests/runner/test_batch_builder.py",
    ),
    mutant(
        "head-reads-no-further", "the head reads the pages behind the step's last token",
        "weft/runner/drafting/drafters.py",
        "min(step.shape.max_seq_len + ahead, ", "min(step.shape.max_seq_len, ",
        "tests/speculation/test_by_batch.py",
    ),
    mutant(
        "graph-drafts-the-most", "a graph of many rows drafts as few tokens as such steps should",
        "weft/runner/drafting/drafters.py", "self.rules.at(inputs.batch.num_seqs)",
        "self.rules.most",
        "tests/speculation/test_by_batch.py",
    ),
    mutant(
        "layers-share-features", "every layer of features gets its own", "weft/models/vision_language.py",
        "embeddings[:, 1 + layer]", "embeddings[:, 1]", "tests/test_fuzz_engine.py::test_random_images",
        "tests/engine/test_images.py",
    ),
    mutant(
        "keys-share-salted-prefixes", "a salt does not make two keys one", "weft/server/client.py",
        'self.identity if given is None else f"{self.identity}:{given}"', "self.identity if given is None else given",
        "tests/server/test_parts.py", "tests/server/test_api.py",
    ),
    mutant(
        "keys-queue-by-connection", "the calls of one key have one turn", "weft/server/client.py",
        "self.identity or self.connection", "self.connection", "tests/server/test_parts.py",
    ),
    mutant(
        "dead-counts-are-lost", "sums do not fall when a process dies", "weft/server/process_reports.py",
        "self._retired.setdefault(what, []).append(last.pop(index))", "last.pop(index)",
        "tests/server/test_api_servers.py::test_reports_are_gathered_and_outlive_their_process",
    ),
    mutant(
        "pushed-and-yielded", "what was pushed is not sent a second time", "weft/server/response_builder.py",
        "if content and not stream.is_delivered:", "if content:", "tests/server/test_pushed_tokens.py",
    ),
    mutant(
        "usage-is-not-forced", "--enable-force-include-usage puts the usage into every chunk",
        "weft/server/response_builder.py", "self.usage_always = forced or bool(", "self.usage_always = bool(",
        "tests/server/test_vllm_shapes.py", "tests/server/test_parts.py",
    ),
    mutant(
        "echo-without-logprobs", "echo with logprobs has those of the prompt", "weft/server/sampling.py",
        '            given["prompt_logprobs"] = min(numbers) if min(numbers) < 0 else max(numbers)  # -1: all\n',
        "            pass\n", "tests/server/test_api.py", "tests/server/test_vllm_shapes.py",
    ),
    mutant(
        "numbers-come-again", "a process that is started again has other request numbers",
        "weft/server/api_servers.py", "self.index + self.restarts.num * _NUMBERS * num_processes", "self.index",
        "tests/server/test_api_servers.py::test_a_look_into_the_engine_is_shown_to_the_process_that_asked",
    ),
    mutant(
        "body-behind-an-answer-is-a-head", "what still comes of an answered request is no head of another",
        "weft/server/connections.py", "return self._is_in_body and self._is_answered", "return False",
        "tests/server/test_connections.py::test_a_body_that_nobody_wants_costs_no_answer",
    ),
    mutant(
        "lingering-for-ever", "the rest of an answered request is read for a while only", "weft/server/connections.py",
        "call_later(LINGER_S, self.cut)", "call_later(1e6, self.cut)",
        "tests/server/test_connections.py::test_a_body_that_nobody_wants_is_not_read_for_ever",
    ),
    mutant(
        "silent-callers-keep-others-out", "answered requests whose rest does not come make room for others",
        "weft/server/connections.py", "            next(iter(self.waiting)).cut()\n", "            pass\n",
        "tests/server/test_connections.py::test_answered_requests_whose_rest_does_not_come_make_room_for_others",
    ),
    mutant(
        "unread-answers-are-kept", "an answer that nobody reads is cut", "weft/server/connections.py",
        "        if before == (self._num_answers, self.transport.get_write_buffer_size()):\n", "        if False:\n",
        "tests/server/test_connections.py::test_an_answer_that_nobody_reads_is_not_kept_for_ever",
    ),
    mutant(
        "slow-readers-are-cut", "an answer is cut only if nothing of it is read", "weft/server/connections.py",
        "        if before == (self._num_answers, self.transport.get_write_buffer_size()):\n", "        if True:\n",
        "tests/server/test_connections.py::test_an_answer_that_is_read_slowly_is_whole",
    ),
    mutant(
        "broken-weights-may-be-tried-again", "a broken checkpoint ends the server with the status of wrong settings",
        "weft/errors.py", "class WeightsError(ConfigError):", "class WeightsError(WeftError):",
        "tests/server/test_faults.py::test_a_checkpoint_that_cannot_be_used_is_told_in_one_line",
    ),
    mutant(
        "api-process-never-serves", "an API process that has served is started again", "weft/server/api_servers.py",
        "        member.restarts.ready()\n", "",
        "tests/server/test_api_servers.py::test_one_that_dies_takes_its_own_calls_only",
    ),
    mutant(
        "half-of-a-tile-lost", "a block of more than half a tile takes a whole one", "weft/ops/moe/blocks.py",
        "<= ROWS // 2", "< ROWS", "tests/ops/moe/test_triton_moe.py::test_blocks_that_are_at_most_half_full",
    ),
    mutant(
        "fp8-sums-without-the-input-scale", "products that leave their sums take the static scale of their inputs",
        "weft/quantization/fp8.py", "fp8_linear_parts(x, weight, scale, static, block",
        "fp8_linear_parts(x, weight, scale, None, block", "tests/quantization/test_parity.py",
    ),
    mutant(
        "head-leaves-sums-to-a-product", "a head's norms add sums, its first product's are whole", "weft/models/mtp.py",
        '        layer = DecoderLayer(config, context, place)',
        '        self.fc.return_partial_sums(None)\n        layer = DecoderLayer(config, context, place)',
        "tests/models/test_mtp.py",
    ),
    mutant(
        "a-head-ends-streams-as-the-model", "a head of streams has a mixer of its own", "weft/models/mtp.py",
        "self._model.head_logits(self._head.head_input(hidden))", "self._model.compute_logits(hidden)",
        "tests/models/test_mtp.py",
    ),
    mutant(
        "a-head-shares-the-models-pass-of-places", "later drafts are other batches, whose pools begin elsewhere",
        "weft/models/mtp.py", "module.begins_pass = True", "module.begins_pass = False",
        "tests/speculation/test_images.py",
    ),
    mutant(
        "tokens-behind-content-are-lost", "log probabilities of space that is held back come with it",
        "weft/server/chat_completions.py", "return entries[first:behind], entries[behind:]",
        "return entries[first:behind], []",
        "tests/server/test_other_protocols.py::test_tokens_behind_content_wait_for_what_becomes_of_them",
    ),
    mutant(
        "successor-is-answered", "who takes the place of a dead process gets no answer to what that asked",
        "weft/server/process_reports.py", "if asked.index == index:", "if False:",
        "tests/server/test_api_servers.py::test_reports_are_gathered_and_outlive_their_process",
    ),
    mutant(
        "hidden-token-ends", "without a new token asked for, none ends a completion", "weft/server/completions.py",
        "return {\"finish_reason\": \"length\", \"stop_reason\": None}",
        "pass", "tests/server/test_api.py::test_echo_with_logprobs_and_no_new_tokens",
    ),
)  # fmt: skip
