"""Log probabilities of prompt tokens, from the hidden states of a step."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.layers.sampler import Logprobs, logprobs_of
from weft.messages import ScheduledRequest
from weft.runner.rows import RowTable


def _num_prompt_logprobs(request: ScheduledRequest, rows: RowTable) -> int:
    """Return how many tokens of the prompt follow one that runs in this step."""
    stop = min(request.start + request.num_tokens + 1, int(rows.num_prompt_tokens[request.row]))
    return max(0, stop - request.start - 1)


def wants_prompt_logprobs(requests: Sequence[ScheduledRequest], rows: RowTable) -> bool:
    """Return whether ``prompt_logprobs_of`` reads hidden states of the step."""
    table = rows.prompt_logprobs
    return bool(table) and any(r.row in table and _num_prompt_logprobs(r, rows) for r in requests)


def prompt_logprobs_of(
    requests: Sequence[ScheduledRequest],
    hidden_states: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    rows: RowTable,
) -> dict[int, Logprobs]:
    """Log probabilities of the prompt tokens that follow the ones run in this step, for the rows that ask.

    Args:
        hidden_states: ``[T, hidden_size]`` of the step's tokens.
        compute_logits: ``[N, hidden_size] -> [N, V]``.
    """
    result: dict[int, Logprobs] = {}
    start = 0
    for request in requests:
        wanted = rows.prompt_logprobs.get(request.row)
        count = _num_prompt_logprobs(request, rows)
        if wanted is not None and count > 0:
            first = request.start + 1
            targets = torch.from_numpy(rows.known_tokens(request.row, first, first + count))
            logits = compute_logits(hidden_states[start : start + count])
            result[request.row] = logprobs_of(logits, targets.long().to(hidden_states.device), wanted)
        start += request.num_tokens
    return result
