"""The part of a sequence that others may reuse when results must not depend on the company (``--deterministic``).

Job: round lengths down to a grid. Owns: these rules. Does not know: the tree, states, steps.

Keys, values and states are reusable if the steps of any request would compute the same bits. Up to the last grid point
of a prompt they would. Generated tokens, and the end of a prompt that fills no chunk, are computed anew.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReuseGrid:
    """The grid of one cache. ``size``: tokens between its points."""

    size: int

    def floor(self, num_tokens: int) -> int:
        """The last point within ``num_tokens`` tokens."""
        return num_tokens // self.size * self.size

    def most_reused(self, num_prompt_tokens: int) -> int:
        """Upper bound on the tokens that a prompt reuses. Two are left to compute (``scheduler/step_grid.py``)."""
        return self.floor(max(0, num_prompt_tokens - 2))
