"""Speed from the view of a command-line user."""

import time

from weft.outputs import RequestOutput


class Meter:
    """Counts prompt, cached and generated tokens since its construction."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self._first: float | None = None
        self._last: float | None = None
        self._generated_at_first = 0
        self._prompt: dict[str, tuple[int, int]] = {}
        self._generated: dict[str, int] = {}

    def take(self, outputs: list[RequestOutput]) -> None:
        """Count the snapshots of one step."""
        for output in outputs:
            self._prompt[output.request_id] = (len(output.prompt_token_ids), output.num_cached_tokens)
            self._generated[output.request_id] = sum(len(c.token_ids) for c in output.outputs)
        self._last = time.perf_counter()
        if self._first is None and self.num_generated:
            self._first, self._generated_at_first = self._last, self.num_generated

    @property
    def num_generated(self) -> int:
        return sum(self._generated.values())

    @property
    def num_prompt(self) -> int:
        return sum(tokens for tokens, _ in self._prompt.values())

    @property
    def num_cached(self) -> int:
        return sum(cached for _, cached in self._prompt.values())

    @property
    def first_token_s(self) -> float | None:
        """Seconds until the first token; None without a token."""
        return None if self._first is None else self._first - self.start

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens per second after the first; None with fewer than two."""
        if self._first is None or self._last is None or self._last <= self._first:
            return None
        return (self.num_generated - self._generated_at_first) / (self._last - self._first)

    def summary(self) -> str:
        """Format one line: ``42 tokens, 310.5 tokens/s, first after 0.05 s; 58 prompt tokens, 0 from the cache``."""
        parts = [f"{self.num_generated} tokens"]
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.1f} tokens/s")
        if self.first_token_s is not None:
            parts.append(f"first after {self.first_token_s:.2f} s")
        return f"{', '.join(parts)}; {self.num_prompt} prompt tokens, {self.num_cached} from the cache"
