"""Does a second stream help small batches outside of graphs? The shared expert beside the router, against one stream.

    python benchmarks/second_stream.py --model qwen3-next-12l --batches 1 8 32 --json FILE

What else is independent in a layer is one product already (q, k and v; all inputs of Gated DeltaNet; the router and the
gate of the shared expert). So the shared expert is what a second stream could overlap, with the router and its choice
of experts. One engine without graphs runs the same decode steps with one stream and with two in interleaved rounds, on
the wall clock from an idle device until it is idle again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from benchmarks.decode_profile import CONFIGS, decode_orders
from weft import report
from weft.config import resolve
from weft.layers.moe import SparseMoe
from weft.runner.model_runner import ModelRunner


class SecondStream:
    """Runs the shared experts of a model on a stream of their own while ``on``."""

    def __init__(self, model: nn.Module) -> None:
        self.on, self.num_layers = False, 0
        self._stream, self._ready = torch.cuda.Stream(), torch.cuda.Event()
        for layer in model.modules():
            if isinstance(layer, SparseMoe) and layer.shared_expert is not None:
                layer.router.register_forward_pre_hook(self._note_input)
                layer.shared_expert.forward = self._beside(layer.shared_expert.forward)  # type: ignore[method-assign]
                self.num_layers += 1

    def _note_input(self, *_: Any) -> None:
        """The layer's input is there: from here on the shared expert may run."""
        if self.on:
            self._ready.record()

    def _beside(self, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            if not self.on:
                return forward(x)
            main = torch.cuda.current_stream()
            self._stream.wait_event(self._ready)
            with torch.cuda.stream(self._stream):
                out = forward(x)
            main.wait_stream(self._stream)
            x.record_stream(self._stream)
            out.record_stream(main)
            return out

        return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-next-12l")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "mamba_ssm_dtype": "bfloat16",
                "max_model_len": 16384, "max_num_seqs": max(args.batches), "cuda_graph_mode": "NONE"}  # fmt: skip
    runner = ModelRunner(resolve(model=str(CONFIGS / args.model), **settings))
    second = SecondStream(runner.model)
    result: dict[str, Any] = {"benchmark": "second_stream", **report.provenance("cuda"), "model": args.model,
                              "layers": second.num_layers, "results": []}  # fmt: skip
    for batch in args.batches:
        step = decode_orders(runner, batch, args.context)
        times: dict[bool, list[float]] = {False: [], True: []}
        for number in range(args.repeats + 3):
            for on in (False, True) if number % 2 else (True, False):
                second.on = on
                torch.cuda.synchronize()
                started = time.perf_counter()
                runner.launch(step)
                torch.cuda.synchronize()
                if number >= 3:
                    times[on].append((time.perf_counter() - started) * 1e3)
        row = {"batch": batch, "one_stream_ms": median(times[False]), "two_streams_ms": median(times[True])}
        row["gain"] = 1 - row["two_streams_ms"] / row["one_stream_ms"]
        result["results"].append({k: round(v, 4) for k, v in row.items()})
        print(f"batch {batch}: {row['one_stream_ms']:.3f} ms with one stream, {row['two_streams_ms']:.3f} with two")
    Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
