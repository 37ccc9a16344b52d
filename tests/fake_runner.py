"""A model made of hashes: executes a scheduler output exactly as the real runner must, on plain Python lists.

Its next token is a function of every token read through the pages *and* of a recurrent state kept in the slot. The
output changes if a page or slot changes owner too early, a page table is stale, a state is fed twice, or a position is
wrong. ``oracle`` computes the same function from the tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from weft.messages import ModelOutput, NewRequest, ScheduledRequest, SchedulerOutput

VOCAB = 1009
START_STATE = 7


def fold(state: int, token: int) -> int:
    """One step of the recurrent 'layer'."""
    return (state * 31 + token + 1) % 1_000_003


def read(tokens: list[int]) -> int:
    """The 'attention' over everything in the cache."""
    return sum((i + 1) * (t + 3) for i, t in enumerate(tokens)) % 999_983


def next_token(state: int, tokens: list[int]) -> int:
    return (state ^ read(tokens)) % VOCAB


def oracle(prompt: list[int], count: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """The ``count`` tokens that follow ``prompt`` (fewer if one of ``stop`` comes up; it is included)."""
    tokens, state, out = list(prompt), START_STATE, []
    for token in tokens:
        state = fold(state, token)
    while len(out) < count:
        token = next_token(state, tokens)
        out.append(token)
        if token in stop:
            break
        tokens.append(token)
        state = fold(state, token)
    return out


def accepted(drafts: list[int], sampled: list[int]) -> list[int]:
    """Return the sampled tokens that count: those equal to drafts, up to the first wrong draft, and the next."""
    wrong = next((i for i, draft in enumerate(drafts) if draft != sampled[i]), len(drafts))
    return sampled[: wrong + 1]


@dataclass
class FakeRow:
    """``drafts``, ``num_rejected``: what the row's last verification leaves on the device."""

    new: NewRequest
    pages: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    num_rejected: int = 0


class FakeRunner:
    """Runs steps in request; results may be collected later.

    Attributes:
        drafter: from the tokens of a sequence to the drafts that the model's own head makes; None: there is no head.
        finds: whether the host is told of a row's drafts, which are on the device in any case.
        num_followed: sequences' steps that followed one whose results the host did not know.
    """

    drafter: Callable[[list[int]], list[int]] | None = None
    num_followed = 0

    def __init__(self, num_pages: int, page_size: int, num_slots: int, hybrid: bool = True) -> None:
        self.page_size = page_size
        self.hybrid = hybrid
        self.pages = [[-1] * page_size for _ in range(num_pages)]
        self.states = [-1] * num_slots
        self.rows: dict[int, FakeRow] = {}
        self.last_token: dict[int, int] = {}
        self.num_tokens_run = 0
        self.finds: Callable[[], bool] = lambda: True

    def spoil(self, pages: Iterable[int], slots: Iterable[int]) -> None:
        """Fill pages and slots that nobody owns with rubbish."""
        for page in pages:
            self.pages[page] = [-1] * self.page_size
        for slot in slots:
            self.states[slot] = -1

    def run(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        for row in scheduler_output.finished_rows:
            self.rows.pop(row, None)
        for new in scheduler_output.new_requests:
            self.rows[new.row] = FakeRow(new)
        for source, target in scheduler_output.page_copies:
            self.pages[target] = list(self.pages[source])
        for source, target in scheduler_output.state_forks:
            self.states[target] = self.states[source]
        seen_decode_end = False
        rows, tokens = [], []
        drafts: dict[int, list[int]] = {}
        for request in map(self._moved, scheduler_output.requests):
            is_decode = request.num_tokens == 1 and request.start > 0 and not request.checkpoints
            assert not (is_decode and seen_decode_end), "decodes must come first"
            seen_decode_end |= not is_decode
            sampled = self._run_one(request)
            if request.samples:
                counted = accepted(request.draft_token_ids, sampled)
                rows += [request.row] * len(counted)
                tokens += counted
                if self.drafter is not None:
                    found = self._draft(request, counted)
                    drafts |= {request.row: found} if self.finds() else {}
        for row, token in zip(rows, tokens, strict=True):
            self.last_token[row] = token
        return ModelOutput(scheduler_output.step, rows, tokens, draft_token_ids=drafts)

    def _draft(self, request: ScheduledRequest, counted: list[int]) -> list[int]:
        """Drafts for the next step of a row."""
        assert self.drafter is not None
        row, count = self.rows[request.row], len(request.draft_token_ids)
        row.num_rejected = count + 1 - len(counted)
        row.drafts = self.drafter(
            self._cached(row, request.start + request.num_tokens - row.num_rejected) + counted[-1:]
        )
        return row.drafts

    def _moved(self, request: ScheduledRequest) -> ScheduledRequest:
        """Return the request with values that only the device knows: the start, the drafts and the checkpoints. Copy
        the state that the request reads to its own slot."""
        if not request.follows:
            return request
        self.num_followed += 1
        row, count = self.rows[request.row], len(request.draft_token_ids)
        assert len(row.drafts) >= count, "there are fewer drafts than the step verifies"
        slots = [*(slot for _, slot in request.checkpoints), request.state_slot]
        start = request.start - row.num_rejected
        if self.hybrid:
            self.states[request.state_slot] = self.states[slots[count - row.num_rejected]]
        checkpoints = [(start + 1 + i, slot) for i, slot in enumerate(slots[:-1])]
        return replace(request, start=start, draft_token_ids=row.drafts[:count], checkpoints=checkpoints)

    def _run_one(self, request: ScheduledRequest) -> list[int]:
        """Return the sampled tokens: one token, or one after the last token and one after every draft."""
        row = self.rows[request.row]
        row.pages.extend(request.new_pages)
        assert len(set(row.pages)) == len(row.pages) and 0 not in row.pages
        state = self.states[request.state_slot] if request.start and self.hybrid else START_STATE
        if not self.hybrid:
            for token in self._cached(row, request.start):
                state = fold(state, token)
        checkpoints, sampled = dict(request.checkpoints), []
        drafts_from = request.start + request.num_tokens - len(request.draft_token_ids)
        for position in range(request.start, request.start + request.num_tokens):
            known = row.new.token_ids
            if position >= drafts_from:
                token = request.draft_token_ids[position - drafts_from]
            else:
                token = known[position] if position < len(known) else self.last_token[request.row]
            page, offset = self.pages[row.pages[position // self.page_size]], position % self.page_size
            if position >= request.write_start:
                page[offset] = token
            assert page[offset] == token, "the KV that is read here belongs to another sequence"
            state = fold(state, token)
            if position + 1 in checkpoints:
                self.states[checkpoints[position + 1]] = state
            if position >= drafts_from - 1:
                sampled.append(next_token(state, self._cached(row, position + 1)))
        if self.hybrid:
            assert request.state_slot > 0
            self.states[request.state_slot] = state
        self.num_tokens_run += request.num_tokens
        return sampled

    def _cached(self, row: FakeRow, count: int) -> list[int]:
        return [self.pages[row.pages[p // self.page_size]][p % self.page_size] for p in range(count)]
