"""Bugs to plant in settings and their verbs, in captured sizes, and in what the cache learns from reuse."""

from __future__ import annotations

from tests.mutation.mutant import mutant

POLICY, PROFILE, SIZES = (
    "tests/cache/test_policy.py",
    "tests/pieces/test_mode_table.py",
    "tests/runner/test_step_graphs.py",
)
RANKS = "tests/executor/test_multi_process.py"

SETTINGS_AND_REUSE = (
    mutant(
        "states-above-unnoticed", "a state that comes above lowers the value of those below",
        "weft/cache/radix_tree.py", "                self.watcher.offer_state(below)", "                pass", POLICY,
    ),
    mutant(
        "reuse-is-not-learned", "what became of states like it weighs a state", "weft/cache/leasing.py",
        "            self.evictor.odds.use(source.kind, source.lineage, source.num_uses)\n", "            pass\n",
        POLICY,
    ),
    mutant(
        "used-since-is-evicted", "a heap's outdated entry is weighed again", "weft/cache/eviction.py",
        "            if utility > entered:\n", "            if False:\n", POLICY,
    ),
    mutant(
        "tries-share-salts", "a weight of eviction is tried under the request's salt", "weft/cache/tuning.py",
        "salt=salt, boundaries=boundaries, counts=counts)", "boundaries=boundaries, counts=counts)", POLICY,
    ),
    mutant(
        "aligned-loses-preempted", "a preempted request resumes where it was, under every policy",
        "weft/cache/manager.py", "self._return(lease, as_tokens(token_ids), keep=True, moves_state=True)",
        'self._return(lease, as_tokens(token_ids), keep=True, moves_state=self.checkpoint_policy != "aligned")',
        "tests/cache/test_manager.py",
    ),
    mutant(
        "state-dtype-unused", "mamba_ssm_dtype is the dtype of the states", "weft/cache/spec.py",
        "state=config.mamba_ssm_dtype)", 'state="float32")', "tests/runner/test_memory.py",
    ),
    mutant(
        "experts-without-biases", "every rank has the biases of its whole experts", "weft/layers/moe.py",
        "            if rank == 0:\n", "            if context.tp.rank == 0:\n", "tests/layers/test_tensor_parallel.py",
    ),
    mutant(
        "decodes-give-their-trace-to-pieces", "pieces are split at names beside compiled decodes",
        "weft/pieces/model_compiler.py", "        self._prepared.pop(self._pieces_source, None)", "        pass",
        "tests/pieces/test_model_compiler.py::test_pieces_are_split_at_names_beside_compiled_decodes",
    ),
    mutant(
        "compile-key-without-keywords", "pieces of other keywords are other pieces", "weft/pieces/inductor.py",
        "(node.args, node.kwargs),", "(node.args, {}),", "tests/pieces/test_sources.py",
    ),
    mutant(
        "verifications-past-the-budget", "verifications are captured as far as a step has room",
        "weft/graph/capture_sizes.py", "size * (1 + count) <= room", "size * count <= room", SIZES,
    ),
    mutant(
        "prefills-past-the-room", "a graph takes as many prefills as it has room for", "weft/graph/dispatcher.py",
        "return size if fits and batch.num_prefills <= MAX_PREFILLS else None", "return size if fits else None",
        "tests/graph/test_dispatcher.py",
    ),
    mutant(
        "profile-of-other-pages", "measured modes hold for one page size", "weft/config/graph_profile.py",
        "page_size max_model_len", "max_model_len", PROFILE,
    ),
    mutant(
        "images-lost-with-drafts", "a model whose drafts are off reads images", "weft/config/resolution.py",
        "    plain = plain.with_vision() if model.runs_vision else plain\n", "", "tests/config/test_draft_profile.py",
    ),
    mutant(
        "priorities-stay-in-the-file", "a line's priority reaches the engine", "weft/cli/generate.py",
        "job.params, priority=job.priority)", "job.params)", "tests/cli/test_generate.py",
    ),
    mutant(
        "no-room-for-drafts", "speculation with room for no draft is refused", "weft/config/draft_choice.py",
        'if values["max_num_batched_tokens"] == 1:', "if False:", "tests/config/test_speculation.py",
    ),
    mutant(
        "compiling-not-waiting", "a request waits while its grammar is compiled", "weft/engine/core.py",
        "replace(scheduler, num_waiting=num_waiting)", "scheduler", "tests/engine/test_structured_outputs.py",
    ),
    mutant(
        "history-forgotten", "processors get the logits of every step of their request",
        "weft/scheduler/scheduler.py", "        self._num_by_history += request.samples_by_history\n", "",
        "tests/engine/test_logits_processors.py",
    ),
    mutant(
        "history-kept", "requests without a history are not looked through for some", "weft/scheduler/scheduler.py",
        "        self._num_by_history -= request.samples_by_history\n", "", "tests/engine/test_logits_processors.py",
    ),
    mutant(
        "decodes-not-logged", "a step's decodes are counted", "weft/engine/inspection.py",
        "num_decodes=num_decodes + len(verifying)", "num_decodes=len(verifying)", "tests/engine/test_inspection.py",
    ),
    mutant(
        "ranks-wait-for-the-dead", "a step beside a dead rank has no end", "weft/executor/multi_process.py",
        "not last.is_done and self._workers.failure() is None", "not last.is_done", RANKS,
    ),
    mutant(
        "ranks-wait-for-ever", "ranks wait so long for a step and no longer", "weft/executor/multi_process.py",
        "if time.monotonic() > deadline:", "if last.is_done:", RANKS,
    ),
)  # fmt: skip
