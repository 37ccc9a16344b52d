"""Bugs to plant in the choice of sequences whose latents are expanded, and in their keys and values."""

from __future__ import annotations

from tests.mutation.mutant import mutant

KERNELS, TESTS = "weft/ops/attention/expanded_latent_hopper.py", "tests/ops/attention/test_expanded_latent.py"
EXPANDED_LATENTS = (
    mutant(
        "short-chunks-expanded", "few tokens behind a context stay absorbed", KERNELS,
        "there & (query_lens >= LEAST)", "there & (query_lens >= 1)", TESTS,
    ),
    mutant(
        "expanded-with-room-to-spare", "what fits in the memory of a graph is expanded", KERNELS,
        "tl.where(candidates, needed, 0), 0) <= room", "tl.where(candidates, needed, 0), 0) < room", TESTS,
    ),
    mutant(
        "one-long-context-for-all", "a context that does not fit takes no room", KERNELS,
        "(kv_lens > query_lens) & (needed <= room)", "(kv_lens > query_lens)", TESTS,
    ),
    mutant(
        "expanded-from-another-token", "a sequence's tiles begin with its first token", KERNELS,
        "tokens = (tile - tl.load(starts + seq)) * TILE + places", "tokens = tile * TILE + places", TESTS,
    ),
    mutant(
        "expanded-as-with-no-end", "absorbed attention leaves out what is expanded", KERNELS,
        "absorbed_lens + own, tl.where(count > 0, query_len, kv_len)", "absorbed_lens + own, kv_len", TESTS,
    ),
    mutant(
        "expanded-heads-at-once", "pages of all heads keep within their memory", KERNELS,
        "    together = max(1, EXPANDED_BYTES //", "    together = max(heads, EXPANDED_BYTES //", TESTS,
    ),
    mutant(
        "expanded-graph-without-a-limit", "the pages of a graph keep within their memory", KERNELS,
        "min(tiles, EXPANDED_BYTES // tile_bytes)", "tiles", TESTS,
    ),
    mutant(
        "expanded-wholly", "the host sees a chunk of few tokens", KERNELS,
        "batch.least_chunk >= _LEAST_CHUNK", "batch.least_chunk >= 1", TESTS,
    ),
    mutant(
        "neighbours-that-are-none", "parts of queries that stand apart are copied", KERNELS,
        "if width == both and neighbours and own.stride() == of_shared.stride() == (own.stride(0), both, 1):",
        "if width == both:", TESTS,
    ),
    mutant(
        "begun-as-continued", "sequences that begin have no least chunk", "weft/runner/step_layout.py",
        "first[num_decodes:] > 0", "first[num_decodes:] >= 0", "tests/runner/test_batch_builder.py",
    ),
    mutant(
        "decodes-without-attention", "decodes beside expanded prompts attend", "weft/layers/latent_attention.py",
        "        elif batch.num_decodes:\n", "        elif False:\n", "tests/models/test_expanded_latents.py",
    ),
    mutant(
        "no-memory-for-expanded", "a start leaves memory for expanded latents", "weft/runner/memory_plan.py",
        'tensor.name == "latent"', 'tensor.name == "latents"', "tests/runner/test_memory.py",
    ),
)  # fmt: skip
