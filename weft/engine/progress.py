"""The progress bar of offline generation.

Job: show finished prompts and the speed of prefill and decode. Owns: the bar and its counters.
Does not know: the engine; it sees outputs only.
"""

from __future__ import annotations

import time
from types import TracebackType

from tqdm import tqdm

from weft.outputs import RequestOutput


class Progress:
    """A bar over ``total`` prompts with prefill and decode tokens per second, silent if not ``enabled``."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._bar = tqdm(total=total, desc="Prompts", unit="prompt", disable=not enabled, dynamic_ncols=True)
        self._start = time.monotonic()
        self._num_generated: dict[str, int] = {}
        self._num_prefilled: dict[str, int] = {}

    def step(self, outputs: list[RequestOutput]) -> None:
        """Take in the outputs of one step."""
        for output in outputs:
            self._num_prefilled[output.request_id] = len(output.prompt_token_ids) - output.num_cached_tokens
            self._num_generated[output.request_id] = sum(len(c.token_ids) for c in output.outputs)
            if output.finished:
                self._bar.update(1)
        if self._bar.disable:
            return
        elapsed = max(time.monotonic() - self._start, 1e-9)
        prefill = sum(self._num_prefilled.values()) / elapsed
        decode = sum(self._num_generated.values()) / elapsed
        self._bar.set_postfix_str(f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s", refresh=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()
