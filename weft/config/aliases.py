"""Other names of the settings: the flags that users of other engines know.

Every field also has the flag of its own name (``max_model_len``: ``--max-model-len``), and every boolean field its
negation (``--no-enable-prefix-caching``).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alias:
    """An alias of a flag: it sets ``field``, or ``key`` in a field, to its argument, or to ``value`` if it takes
    none."""

    field: str
    value: bool | None = None
    key: str | None = None


ALIASES: Mapping[str, Alias] = {
    "--tp": Alias("tensor_parallel_size"),
    "--tp-size": Alias("tensor_parallel_size"),
    "-tp": Alias("tensor_parallel_size"),
    "--dp": Alias("data_parallel_size"),
    "--dp-size": Alias("data_parallel_size"),
    "-dp": Alias("data_parallel_size"),
    "--mem-fraction-static": Alias("gpu_memory_utilization"),
    "--max-running-requests": Alias("max_num_seqs"),
    "--chunked-prefill-size": Alias("max_num_batched_tokens"),
    "--context-length": Alias("max_model_len"),
    "--disable-cuda-graph": Alias("enforce_eager", value=True),
    "--disable-radix-cache": Alias("enable_prefix_caching", value=False),
    "--mamba-scheduler-strategy": Alias("state_checkpoint_policy"),
    "--mamba-radix-cache-strategy": Alias("state_checkpoint_policy"),
    "--enable-deterministic-inference": Alias("deterministic", value=True),
    "--hicache-write-policy": Alias("kv_offloading_policy"),
    "--profile": Alias("profile_dir"),
    "--speculative-algorithm": Alias("speculative_config", key="algorithm"),
    "--speculative-num-steps": Alias("speculative_config", key="num_steps"),
    "--speculative-eagle-topk": Alias("speculative_config", key="eagle_topk"),
    "--speculative-num-draft-tokens": Alias("speculative_config", key="num_draft_tokens"),
    "--speculative-ngram-min-match-window-size": Alias("speculative_config", key="ngram_min_match_window_size"),
    "--speculative-ngram-max-match-window-size": Alias("speculative_config", key="ngram_max_match_window_size"),
}

_SIZE = "give --kv-offloading-size, the GiB of host memory over all ranks"

REFUSED_FLAGS: Mapping[str, str] = {
    "--enable-hierarchical-cache": _SIZE,
    "--hicache-size": f"it counts GB of each rank; {_SIZE}",
    "--hicache-ratio": f"it counts multiples of the device's memory; {_SIZE}",
}
"""Flags of SGLang without an equal meaning here, each with the remedy."""

SERVER_FLAGS = ("--api-key", "--host", "--port")
"""Flags of ``weft serve``. The other verbs refuse them by name and do not call them unknown."""
