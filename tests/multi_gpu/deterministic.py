"""One deterministic engine in a process of its own: tokens and log probabilities as JSON.

``python -m tests.multi_gpu.deterministic FOLDER alone|company SETTINGS``. Alone every prompt has a step to itself. In
company all run at once, twice, so that the second time they hit the prefix cache.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from weft import LLM, RequestOutput, SamplingParams

LENGTHS = (1, 63, 64, 65, 129, 210, 700)


def bits_of(output: RequestOutput) -> list[Any]:
    completion = output.outputs[0]
    assert completion.logprobs is not None
    tops = [sorted((token, entry.logprob) for token, entry in entries.items()) for entries in completion.logprobs]
    return [list(completion.token_ids), tops]


def main(folder: str, how: str, given: str) -> None:
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(200) for _ in range(length)]} for length in LENGTHS]
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=12, ignore_eos=True, logprobs=2, detokenize=False)
        for i in range(len(prompts))
    ]
    company = {"max_num_batched_tokens": 300, "max_num_seqs": 6, "num_kv_pages": 400, "page_size": 16}
    alone = {"enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 1}
    settings = (company if how == "company" else alone) | json.loads(given)
    with LLM(folder, skip_tokenizer_init=True, deterministic=True, **settings) as llm:
        if how == "alone":
            found = [[bits_of(llm.generate(p, s, use_tqdm=False)[0]) for p, s in zip(prompts, params, strict=True)]]
        else:
            found = [[bits_of(output) for output in llm.generate(prompts, params, use_tqdm=False)] for _ in range(2)]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
