"""The result of a prefix lookup, and the reason why it found no more."""

import time

import msgspec

from weft.cache.nodes import Checkpoint, Prefix, Tokens
from weft.cache.tier import Below
from weft.multimodal.items import media_name
from weft.outputs import CacheReport


class Match(msgspec.Struct, frozen=True):
    """The cached part of a sequence. Valid until the cache changes (``version``).

    Attributes:
        tokens: the sequence looked up.
        salt: the salt of the entries that were looked at.
        num_tokens: number of reusable tokens: their KV and a state are stored, and at least one token is left to
            compute.
        prefix: the stored prefix. Its KV may be longer than ``num_tokens``.
        checkpoint: the state after ``num_tokens`` tokens; None if none is needed or there is none.
        reuse: False if the request asked for none; then ``num_tokens`` is 0.
        below: a longer prefix that the tier below the device has.
    """

    tokens: Tokens
    salt: str | None
    num_tokens: int
    prefix: Prefix
    checkpoint: Checkpoint | None
    version: int
    reuse: bool = True
    below: Below | None = None

    @property
    def num_kv_tokens(self) -> int:
        return self.prefix.num_tokens


def explain(match: Match, *, needs_state: bool) -> CacheReport:
    """Explain a match, with what the tree remembers of evictions."""
    kv = match.num_kv_tokens
    reasons = [] if match.reuse else ["reuse was not wanted, every prompt position has to be computed"]
    if match.reuse and needs_state and match.num_tokens < min(kv, len(match.tokens) - 1):
        reasons.append(_why_no_state(match))
    if match.reuse and kv < len(match.tokens) - 1:
        reasons.append(_why_no_kv(match))
    if match.below is not None and match.below.refused:
        reasons.append(f"host memory has {match.below.num_tokens:,} tokens, but {match.below.refused}")
    return CacheReport(
        num_prompt_tokens=len(match.tokens),
        num_kv_tokens=kv,
        state_position=match.num_tokens if needs_state else None,
        num_reused_tokens=match.num_tokens,
        num_recomputed_tokens=max(0, min(kv, len(match.tokens)) - match.num_tokens),
        reason="; ".join(reasons),
    )


def _why_no_state(match: Match) -> str:
    """The latest evicted state between the reuse and the end of the KV, or the fact that there never was one."""
    limit = min(match.num_kv_tokens, len(match.tokens) - 1)
    for node in match.prefix.node.path() if match.prefix.node is not None else ():
        lost = [p for p in node.lost_states if match.num_tokens < p <= limit]
        if lost:
            position = max(lost)
            return f"state at {position:,} evicted {_ago(node.lost_states[position])}"
    return f"no state was ever stored between {match.num_tokens:,} and {limit:,}"


def _why_no_kv(match: Match) -> str:
    node, kv = match.prefix.node, match.num_kv_tokens
    if node is None:
        return "nothing is stored"
    if kv < node.end or node.children:
        lost = node.lost_continuations.get(int(match.tokens[kv])) if kv == node.end else None
        where = f"the prompt leaves everything stored at {kv:,}"
    else:
        lost = node.lost_continuations.get(int(match.tokens[kv]))
        where = f"nothing beyond {kv:,} was ever stored"
    return f"{where}{_at_image(match)}" if lost is None else f"KV beyond {kv:,} evicted {_ago(lost)}"


def _at_image(match: Match) -> str:
    """The image that is not stored, if one is at the end of the stored KV."""
    token = int(match.tokens[match.num_kv_tokens])
    return f", at the image or video {media_name(token)}" if token < 0 else ""


def _ago(moment: float) -> str:
    """Seconds since ``moment`` of ``time.monotonic()``, in words."""
    return f"{max(0.0, time.monotonic() - moment):.3g} s ago"
