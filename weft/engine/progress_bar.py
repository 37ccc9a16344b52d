"""The progress bar of offline generation."""

import time
from typing import Self

from tqdm import tqdm

from weft.engine.output_processor import OutputStream


class ProgressBar:
    """A bar over ``total`` prompts, with prefill and decode tokens per second since its start. Silent if not
    enabled."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._bar = tqdm(total=total, desc="Prompts", unit="prompt", dynamic_ncols=True) if enabled else None
        self._start = time.monotonic()
        self._counted: dict[str, tuple[int, int]] = {}
        self._num_prefilled = 0
        self._num_generated = 0

    def step(self, changed: list[OutputStream]) -> None:
        if self._bar is None:
            return
        for stream in changed:
            prefilled, generated = self._counted.get(stream.request_id, (0, 0))
            self._counted[stream.request_id] = stream.num_prefilled_tokens, stream.num_output_tokens
            self._num_prefilled += stream.num_prefilled_tokens - prefilled
            self._num_generated += stream.num_output_tokens - generated
            self._bar.update(stream.finished)
        elapsed = max(time.monotonic() - self._start, 1e-9)
        prefill, decode = self._num_prefilled / elapsed, self._num_generated / elapsed
        self._bar.set_postfix_str(f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s", refresh=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()
