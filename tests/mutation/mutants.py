"""Bugs to plant, each with the promise that it breaks and the tests that should notice.

A mutant is one piece of text in one file, replaced by another. Where the text is gone, ``run`` says so: the mutant is
then rewritten for the code that took its place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug.

    Attributes:
        name: short and unique.
        promise: what it breaks.
        path: file, from the root of the project.
        old, new: text that stands there once, and what takes its place.
        tests: what pytest is given.
    """

    name: str
    promise: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


def _mutant(name: str, promise: str, path: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, promise, path, old, new, tests)


MUTANTS = (
    # -- found to survive by an audit ------------------------------------------------------------------------------
    _mutant(
        "llm-drops-turn-boundaries", "chat prompts carry where the next prompts leave them", "weft/engine/llm.py",
        '({"checkpoint_positions": chat.turn_boundaries} if chat.turn_boundaries else {})', "{}",
        "tests/engine/test_chat_prompts.py::test_chat_prompts_carry_their_turn_boundaries",
    ),
    _mutant(
        "server-drops-turn-boundaries", "chat requests carry where the next prompts leave them",
        "weft/server/chat_completions.py",
        "positions = {*chat.turn_boundaries, *(request.checkpoint_positions or ())}",
        "positions = {*(request.checkpoint_positions or ())}",
        "tests/server/test_model.py::test_another_question_reuses_the_system_block",
    ),
    _mutant(
        "server-drops-positions", "checkpoint_positions of a chat request count", "weft/server/chat_completions.py",
        "positions = {*chat.turn_boundaries, *(request.checkpoint_positions or ())}",
        "positions = {*chat.turn_boundaries}",
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
        "old-snapshot-kept", "a decoding request keeps one snapshot", "weft/cache/manager.py",
        "                self._drop_snapshot(lease)\n                lease.snapshot = orders[0]",
        "                lease.snapshot = orders[0]",
        "tests/scheduler/test_prefix_reuse.py",
    ),
    _mutant(
        "compile-key-without-versions", "an artefact holds for the versions that it was made with",
        "weft/graph/inductor.py", 'return "\\n".join([*versions, f"python {sys.version}", where])', "return where",
        "tests/graph/test_piece_sources.py",
    ),
    _mutant(
        "compile-key-without-device", "an artefact holds for the device that it was made for",
        "weft/graph/inductor.py", 'return "\\n".join([*versions, f"python {sys.version}", where])',
        'return "\\n".join([*versions, f"python {sys.version}"])',
        "tests/graph/test_piece_sources.py",
    ),
    _mutant(
        "split-loses-order", "parts of a cut graph keep the original order", "weft/graph/splitting.py",
        "keep_original_order=True", "keep_original_order=False",
        "tests/graph/test_splitting.py",
    ),
    _mutant(
        "padding-meets-experts", "padding rows are sent to no expert", "weft/layers/moe.py",
        "num_tokens=batch.num_tokens if batch.token_count is None else batch.token_count,",
        "num_tokens=x.shape[0],",
        "tests/layers/test_layers.py",
    ),
    _mutant(
        "chat-doubles-bos", "a chat prompt has the BOS of its template only", "weft/engine/chat_prompts.py",
        "self._tokenizer.encode(text, add_special_tokens=False, limit=limit)",
        "self._tokenizer.encode(text, limit=limit)",
        "tests/engine/test_chat_prompts.py::test_a_bos_comes_from_the_template_alone",
    ),
    _mutant(
        "padding-claims-tokens", "padding sequences of a mixture have no tokens", "weft/runner/batch_builder.py",
        'host["cu_seqlens_q"][real.num_seqs + 1 : padded.num_seqs + 1] = real.num_tokens',
        'host["cu_seqlens_q"][real.num_seqs + 1 : padded.num_seqs + 1] = size',
        "tests/runner/test_batch_builder.py",
    ),
    _mutant(
        "no-nvtx", "steps are marked for NVIDIA's profilers", "weft/runner/profiler.py",
        "torch.cuda.nvtx.range(name) if torch.cuda.is_available() else nullcontext()", "nullcontext()",
        "tests/runner/test_profiler.py",
    ),
    _mutant(
        "top-p-one-too-many", "top-p keeps the smallest set whose share reaches it", "weft/ops/sampling.py",
        "(before < share * mass[:, -1:])", "(before <= share * mass[:, -1:])",
        "tests/ops/test_sampling.py",
    ),
    _mutant(
        "explains-the-wrong-state", "a miss names the latest state that was lost", "weft/cache/match.py",
        "position = max(lost)", "position = min(lost)",
        "tests/cache/test_manager.py",
    ),
)  # fmt: skip
