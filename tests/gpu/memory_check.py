"""Random small engines of every family, to be run under compute-sanitizer: ``python -m tests.gpu.memory_check``.

Job: for every seed, one engine with random sizes, settings and traffic, and dummy weights. Owns: the ranges. Does not
know: what a right token is (``tests/fuzz_engine.py`` does); a kernel that leaves its tensors ends the process here, or
is reported by the sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python -m tests.gpu.memory_check --rerun --seconds 300
    python -m tests.gpu.memory_check --poison --seconds 100

With ``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` each tensor has an allocation of its own, so that the sanitizer sees every
access beyond a tensor. Captures need the caching allocator. ``--rerun`` therefore runs the function of a graph again,
with its padded sizes, in place of a capture and of each replay. ``--poison`` fills new memory with values that are bad
indices and bad numbers.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from tests.tiny import ARCHITECTURES, MAMBA_ARCHITECTURES, make_config
from weft import LLM, SamplingParams
from weft.errors import WeftError
from weft.graph.graph_set import FunctionRecorder, GraphSet

MODES = ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL", "FULL")
ALL = tuple(dict.fromkeys((*ARCHITECTURES, *MAMBA_ARCHITECTURES)))
HEADS = ("BambaForCausalLM", "FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM", "JambaForCausalLM")
"""Families whose heads have ``hidden_size / num_attention_heads`` dimensions."""


def sizes(arch: str, rng: random.Random) -> dict[str, Any]:
    """Random sizes that the family's config takes."""
    found: dict[str, Any] = {"vocab_size": rng.choice([33, 64, 211, 500, 2049])}
    if arch not in ("FalconMambaForCausalLM", "Mamba2ForCausalLM"):
        found["max_position_embeddings"] = 1024
    if arch in ("FalconMambaForCausalLM", "Mamba2ForCausalLM"):
        found |= {"num_hidden_layers": 2}
        if arch == "FalconMambaForCausalLM":
            found |= {"hidden_size": rng.choice([32, 48, 80]), "state_size": rng.choice([8, 12, 16])}
        return found
    if arch in HEADS or "Bamba" in arch:
        return found | {"intermediate_size": rng.choice([40, 56, 64, 136])}
    found |= {"hidden_size": rng.choice([32, 48, 64, 96]), "intermediate_size": rng.choice([40, 56, 64, 136])}
    if arch != "KimiLinearForCausalLM":
        kv = rng.choice([1, 2, 4])
        found |= {
            "head_dim": rng.choice([16, 24, 32, 64, 128]),
            "num_key_value_heads": kv,
            "num_attention_heads": kv * rng.choice([1, 2, 3, 5]),
        }
    if arch in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM"):  # heads divide the hidden size
        found["num_attention_heads"] = found["num_key_value_heads"] * rng.choice([1, 2, 4])
    if "Conditional" in arch:
        found["head_dim"] = rng.choice([16, 32, 64])
    experts = rng.randint(4, 9)
    if arch == "GptOssForCausalLM":
        found |= {"num_local_experts": experts, "num_experts_per_tok": rng.randint(1, 3)}
        found |= {"sliding_window": rng.choice([4, 20, 33, 128])}
    elif arch == "Gemma3ForCausalLM":
        found |= {"sliding_window": rng.choice([4, 20, 33, 128])}
    elif "Moe" in arch or "Next" in arch:
        found |= {"num_experts": experts, "num_experts_per_tok": rng.randint(1, 4)}
        found |= {"moe_intermediate_size": rng.choice([16, 24, 40])}
    if "Next" in arch or "Qwen3_5" in arch or "Olmo" in arch:
        key_heads = rng.choice([1, 2])
        found |= {
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": key_heads * rng.choice([1, 2, 3]),
            "linear_key_head_dim": rng.choice([8, 16, 40, 64]),
            "linear_value_head_dim": rng.choice([8, 16, 40, 64]),
        }
    return found


def settings(rng: random.Random, device: str, mode: str | None) -> dict[str, Any]:
    """Random settings of the engine."""
    page_size, length, seqs = rng.choice([1, 1, 2, 4, 16, 32]), rng.choice([40, 160, 700]), rng.randint(1, 6)
    pages = -(-length // page_size)
    chosen = mode or rng.choice(MODES)
    found: dict[str, Any] = {
        "device": device,
        "dtype": rng.choice(["bfloat16", "bfloat16", "float32"]),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "page_size": page_size,
        "max_model_len": length,
        "num_kv_pages": 1 + pages + rng.choice([0, 1, 7, pages // 2, 3 * pages]),
        "max_num_seqs": seqs,
        "max_num_batched_tokens": max(seqs, rng.choice([8, 24, 64, 200, 300])),
        "enable_prefix_caching": rng.random() < 0.7,
        "enable_overlap": rng.random() < 0.8,
        "cuda_graph_mode": chosen,
        "seed": rng.randrange(1000),
    }
    if found["dtype"] != "float32" and rng.random() < 0.25:
        found["kv_cache_dtype"] = "fp8"
    if found["dtype"] != "float32" and rng.random() < 0.25:
        found["quantization"] = "fp8"
    if rng.random() < 0.25:
        drafts = rng.randint(1, 4)
        found["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 1}
    if chosen in ("PIECEWISE", "FULL_AND_PIECEWISE", "FULL"):
        found["piecewise_cuda_graph_tokens"] = rng.choice([[8, 32], [1, 3, 17], [7]])
    return found


def traffic(llm: LLM, rng: random.Random, vocab: int, length: int) -> int:
    """Random requests, ids at both edges of the vocabulary among them. Returns how many ended."""
    prompts: list[list[int]] = []
    for _ in range(rng.randint(3, 9)):
        base = rng.choice(prompts)[: rng.randint(0, length - 1)] if prompts and rng.random() < 0.5 else []
        new = [rng.choice([0, vocab - 1, rng.randrange(vocab)]) for _ in range(rng.choice([1, 2, 17, 63, 64, 65, 300]))]
        prompts.append((base + new)[: length - 1])
    params = [
        SamplingParams(
            max_tokens=rng.choice([1, 2, 9, 40]), ignore_eos=True, detokenize=False, seed=rng.randrange(99),
            temperature=rng.choice([0.0, 1.0]), top_p=rng.choice([1.0, 0.9]), top_k=rng.choice([0, 0, 5]),
            min_p=rng.choice([0.0, 0.0, 0.1]), logprobs=rng.choice([None, None, 2]),
            presence_penalty=rng.choice([0.0, 0.0, 0.4]),
        )
        for _ in prompts
    ]  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for output in outputs:
        ids = output.outputs[0].token_ids
        assert all(0 <= token < vocab for token in ids), f"token ids beyond the vocabulary: {ids}"
    return len(outputs)


def poisoned(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.empty`` whose memory is a bad index and a bad number everywhere."""

    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        if tensor.is_cuda and tensor.dtype.itemsize > 1:
            tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 0x5A5A5A5A)
        return tensor

    return filled


def rerun_graphs() -> None:
    """Call the functions of graphs eagerly, with padded sizes, where they would be captured and replayed."""
    make = GraphSet.__init__

    def init(self: Any, what: str, recorder: Any, *args: Any, **kwargs: Any) -> None:
        self.recorder = recorder
        make(self, what, recorder, *args, **kwargs)

    patched: Any = GraphSet
    patched.__init__ = init
    patched.replay = lambda self, size, num_rows: self.recorder.warm_up(size)
    recorders: Any = FunctionRecorder
    recorders.record = lambda self, size: (None, self.warm_up(size))


def run(seed: int, folder: Path, device: str, mode: str | None, families: tuple[str, ...]) -> str:
    """One engine. Returns what it was."""
    rng = random.Random(seed)
    arch = rng.choice(families)
    given = sizes(arch, rng)
    chosen = settings(rng, device, mode)
    what = f"{seed} {arch} {given} { ({k: v for k, v in chosen.items() if k not in ('device', 'load_format')}) }"
    print(what, flush=True)
    path = folder / str(seed)
    try:
        config = make_config(arch, **given)
        config.architectures = [arch]
        config.save_pretrained(path)
        with LLM(str(path), **chosen) as llm:
            ended = traffic(llm, rng, given["vocab_size"], chosen["max_model_len"])
    except (WeftError, ValueError, StrictDataclassError) as error:
        return f"refused: {str(error).splitlines()[0][:150]}"
    if device == "cuda":
        torch.cuda.synchronize()
    return f"{ended} requests"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10**6)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mode")
    parser.add_argument("--families", nargs="*", default=list(ALL))
    parser.add_argument("--poison", action="store_true")
    parser.add_argument("--rerun", action="store_true")
    args = parser.parse_args()
    if args.rerun:
        args.mode = args.mode or "FULL"
        rerun_graphs()
    faulthandler.enable()
    if args.poison:
        torch.empty = poisoned(torch.empty)  # type: ignore[assignment]
    end, engines, refused = time.monotonic() + args.seconds, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.first, args.first + args.count):
            if time.monotonic() > end:
                break
            start = time.monotonic()
            came = run(seed, Path(folder), args.device, args.mode, tuple(args.families))
            engines, refused = engines + 1, refused + came.startswith("refused")
            print(f"  {came}, {time.monotonic() - start:.1f} s", flush=True)
    print(f"{engines} engines, {refused} of them refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
