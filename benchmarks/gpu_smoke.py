"""The bundled model on the GPU: answers equal to the CPU's, with and without graphs, kernels and overlap."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from weft import LLM, SamplingParams

QUESTIONS = [
    "What is 12 + 30?",
    "What is 745 - 286?",
    "What is 47 * 6?",
    "What is Weft?",
    "Tom has 3 apples and buys 12 more. How many?",
]


def main() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=64)
    prompts = [[{"role": "user", "content": q}] for q in QUESTIONS]
    with LLM(device="cpu") as llm:
        want = [o.outputs[0].token_ids for o in llm.chat(prompts, params, use_tqdm=False)]
    for backend, mode, overlap in itertools.product(("torch", "triton"), ("NONE", "FULL_DECODE_ONLY"), (False, True)):
        if backend == "torch" and mode != "NONE":
            continue
        start = time.perf_counter()
        settings = {
            "backend": backend,
            "cuda_graph_mode": mode,
            "enable_overlap": overlap,
            "max_num_seqs": 16,
            "dtype": "float32",
        }
        try:
            with LLM(device="cuda", **settings) as llm:
                got = [o.outputs[0].token_ids for o in llm.chat(prompts, params, use_tqdm=False)]
        except Exception as error:
            import traceback

            traceback.print_exc(limit=-6)
            print(backend, mode, overlap, "FAILED", type(error).__name__, str(error)[:300], flush=True)
            continue
        same = sum(a == b for a, b in zip(got, want, strict=True))
        print(
            backend,
            mode,
            "overlap" if overlap else "-",
            f"{same}/{len(want)} equal",
            f"{time.perf_counter() - start:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
