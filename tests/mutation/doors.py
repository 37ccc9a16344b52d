"""Bugs to plant in settings, tool calls, hashes of prefixes, drafts beside prefills, and names of vLLM."""

from __future__ import annotations

from tests.mutation.mutant import mutant

DOORS = (
    mutant(
        "named-call-allows-all", "a function that is named is the only one that is called", "weft/server/tool_use.py",
        "{name: schemas[name]}, several=False)", "schemas, several=False)", "tests/server/test_tool_use.py",
    ),
    mutant(
        "image-ids-lose-their-size", "two images have two hashes", "weft/engine/prefix_hashes.py",
        'tokens = np.frombuffer(array("q", chunk), dtype=np.int64)',
        'tokens = np.array([max(token, 0) for token in chunk], dtype=np.int64)', "tests/engine/test_router.py",
    ),
    mutant(
        "no-drafts-beside-prefills", "a request drafts while another one's prompt is computed",
        "weft/scheduler/draft_steps.py", "    if not drafts:\n", "    if not drafts or len(decoding) < len(planned):\n",
        "tests/scheduler/test_draft_steps.py",
    ),
    mutant(
        "answers-of-others-do-not-count", "compile processes that answer are not given up",
        "weft/runner/compile_processes.py",
        "is_compiled = compiled.result(STUCK_S)\n                self._answered = time.monotonic()\n",
        "is_compiled = compiled.result(STUCK_S)\n", "tests/runner/test_compile_processes.py",
    ),
    mutant(
        "tower-is-shared-out", "every rank has the whole vision tower", "weft/config/weights.py",
        "return (weight_bytes(model, dtype) - tower) // ranks + tower", "return weight_bytes(model, dtype) // ranks",
        "tests/config/test_vision.py",
    ),
    mutant(
        "one-gpu-for-all-ranks", "a replica on Ray has a GPU for each rank", "weft/engine/ray_cluster.py",
        'return {"GPU": size, "CPU": size}', 'return {"GPU": 1, "CPU": size}', "tests/engine/test_replica_drains.py",
    ),
    mutant(
        "ranks-take-all-threads", "ranks on the CPU share its processors", "weft/executor/multi_process.py",
        "WorkerStart(size, config, address, shared,", "WorkerStart(size, config, address, self._num_threads,",
        "tests/executor/test_multi_process.py",
    ),
    mutant(
        "media-settings-unsaid", "a setting without effect says so", "weft/config/effects.py",
        "yield from ((name, why) for name in _MEDIA)", "yield from ((name, why) for name in _MEDIA[:3])",
        "tests/config/test_effects.py",
    ),
    mutant(
        "room-for-one-more", "a prompt and max_tokens fit the context", "weft/engine/input_processor.py",
        "if longest + wanted > limit:", "if longest + wanted > limit + 1:",
        "tests/server/test_api.py::test_max_tokens_beyond_the_context_is_refused_with_the_numbers",
    ),
    mutant(
        "assigned-values-unchecked", "an assigned sampling parameter is validated", "weft/sampling_params.py",
        "            super().__setattr__(name, before)\n            raise\n", "            return\n",
        "tests/test_sampling_params.py",
    ),
    mutant(
        "url-before-the-answer", "the URL is told once the port answers", "weft/server/http_server.py",
        "        await super().startup(sockets)\n        self._on_answering()\n",
        "        self._on_answering()\n        await super().startup(sockets)\n", "tests/server/test_api_servers.py",
    ),
)  # fmt: skip
