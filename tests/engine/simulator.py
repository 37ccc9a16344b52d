"""Expected results of a request in plain Python: transformers' logits, one uncached pass per token, and lists.

Job: ``greedy``, an oracle for greedy decoding with every option that changes logits or ends the generation.
Does not know: Weft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch


def next_logits(model: Any, tokens: Sequence[int]) -> list[float]:
    """The reference's logits after ``tokens``."""
    return list(_next_logits(model, tuple(tokens)))


@lru_cache(maxsize=5000)
def _next_logits(model: Any, tokens: tuple[int, ...]) -> list[float]:
    """Options are compared on one prompt, so most prefixes come several times."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].tolist()


def log_probs(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """``[len(tokens), V]``: log probabilities of what follows each position."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].log_softmax(-1)


def penalised(
    logits: list[float],
    prompt: Sequence[int],
    output: Sequence[int],
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
) -> list[float]:
    """CTRL's repetition penalty over prompt and output, OpenAI's frequency and presence penalties over the output."""
    result = list(logits)
    for token in set(prompt) | set(output):
        result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
    for token in set(output):
        result[token] -= frequency * list(output).count(token) + presence
    return result


def greedy(
    model: Any,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    ends: Sequence[int] = (),
    min_tokens: int = 0,
    bias: dict[int, float] | None = None,
    allowed: Sequence[int] | None = None,
    bad: Sequence[Sequence[int]] = (),
    **penalties: float,
) -> list[int]:
    """Tokens of a greedy generation; ``ends`` stop it, ``bad`` are token sequences that must not appear."""
    output: list[int] = []
    while len(output) < max_tokens and not (output and output[-1] in ends):
        logits = next_logits(model, [*prompt, *output])
        for token, value in (bias or {}).items():
            logits[token] += value
        blocked = set(ends) if len(output) < min_tokens else set()
        blocked |= {w[-1] for w in bad if list(w[:-1]) == output[len(output) - len(w) + 1 :][: len(w) - 1]}
        if allowed is not None:
            blocked |= set(range(len(logits))) - set(allowed)
        logits = penalised(logits, prompt, output, **penalties)
        output.append(max(range(len(logits)), key=lambda t: -math.inf if t in blocked else logits[t]))
    return output


def filtered(
    logits: list[float], temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """Probabilities after temperature, top-k, top-p and min-p, each applied to what the one before left."""
    weights = [math.exp(x / temperature - max(logits) / temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda t: -weights[t])
    kept = order[:top_k] if top_k else order
    total, mass, nucleus = sum(weights[t] for t in kept), 0.0, []
    for token in kept:
        if mass >= top_p * total:
            break
        nucleus.append(token)
        mass += weights[token]
    final = [t for t in nucleus if weights[t] >= min_p * weights[order[0]]]
    total = sum(weights[t] for t in final)
    return [weights[t] / total if t in final else 0.0 for t in range(len(weights))]
