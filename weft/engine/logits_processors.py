"""Logits processors: callables of the user that change the logits of one request.

Each is bound to the tokens of its request so far. A processor that fails ends its own request alone.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.request import Request

if TYPE_CHECKING:
    from torch import Tensor

    from weft.layers.sampler import LogitsProcessor

logger = logging.getLogger(__name__)


def processors_of(sampling: Iterable[tuple[int, Request]]) -> dict[int, LogitsProcessor]:
    """The logits processors of requests that have some, by row."""
    return {row: partial(_process, request) for row, request in sampling if request.logits_processors}


def _process(request: Request, logits: Tensor) -> Tensor:
    """Apply all processors to logits ``[V]``. Returns NaN if one of them fails, which ends the request with
    ``"error"``."""
    try:
        for processor in request.logits_processors:
            result = _call(processor, request, logits)
            if result.shape != logits.shape:
                raise ValueError(f"returned logits of shape {tuple(result.shape)}, not {tuple(logits.shape)}")
            logits = result
    except Exception:
        logger.exception("%s: a logits processor failed; the request ends with an error", request.request_id)
        return logits.new_full(logits.shape, float("nan"))
    return logits


def _call(processor: Callable[..., Any], request: Request, logits: Tensor) -> Tensor:
    output = list(request.output_token_ids)
    if num_arguments(processor) == 3:
        return processor(list(request.prompt_token_ids), output, logits)
    return processor(output, logits)


def num_arguments(processor: Callable[..., Any]) -> int:
    """Number of positional arguments without a default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(processor).parameters.values()
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)
