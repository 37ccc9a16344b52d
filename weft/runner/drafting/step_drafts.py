"""Drafts in the steps of one runner, from their layout to the drafts for the next step.

Job: say which steps run as verifications, move a step back by rejected drafts, accept drafts. ``drafters.py`` makes new
drafts. Owns: the drafts and rejections of every row. Does not know: which requests get drafts, how tokens are sampled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.config import EngineConfig
from weft.graph.batch_descriptor import BatchDescriptor
from weft.messages import NewRequest, ScheduledRequest
from weft.ops.backend import Backend
from weft.ops.drafts import accept_drafts, follow_step, right_drafts
from weft.ops.drafts.types import NO_DRAFT, AcceptanceRule, PageTable, RowState
from weft.runner.buffers import device_ints
from weft.runner.drafting.acceptance import Acceptance, accept
from weft.runner.rows import RowTable
from weft.runner.step_inputs import SamplingTensors, StepInputs


@dataclass(frozen=True, slots=True)
class DraftRules:
    """How drafts are laid out in a step.

    Attributes:
        most: most drafts of a request in a step.
        at: from the requests of a step to the drafts that each of them should have.
        verifies: steps of sequences with equally many drafts run as verifications.
        keeps_states: the model stores a state after each draft.
        on_device: a step may follow another whose acceptance only the device knows.
    """

    most: int
    at: Callable[[int], int]
    verifies: bool
    keeps_states: bool
    on_device: bool = False

    @staticmethod
    def of(config: EngineConfig) -> DraftRules | None:
        """Return the rules of an engine; None if it drafts nothing."""
        if config.speculative_config is None:
            return None
        keeps_states, on_device = config.model_config.is_hybrid, config.drafts_on_device
        return DraftRules(config.num_drafts, config.num_drafts_at, config.verifies, keeps_states, on_device)

    def query_len(self, num_seqs: int) -> int:
        """Return the tokens of each of ``num_seqs`` sequences that verify drafts."""
        return 1 + self.at(num_seqs)

    def query_len_of(self, requests: list[ScheduledRequest]) -> int:
        """Return the tokens of each request if all verify as many drafts as they should, and store no other states;
        otherwise 0: for fewer drafts no kernels are compiled at start."""
        count = self.at(len(requests))
        if not (self.verifies and count and requests and len(requests[0].draft_token_ids) == count):
            return 0
        states = count if self.keeps_states else 0
        alike = all(len(r.draft_token_ids) == count and len(r.checkpoints) == states for r in requests)
        return 1 + count if alike else 0


@dataclass(frozen=True, slots=True)
class RunStep:
    """A step of any kind after its forward pass, as drafters read it.

    Attributes:
        shape: the step's real sizes.
        hidden_states: ``[T, hidden_size]``, the output of the model.
        token_ids: ``[M]`` int64, sampled at the positions of the requests that sample; None if nothing was sampled.
        acceptance: the acceptance of the drafts that the step verified; None if there were none.
        inputs_for: from sizes to the step's tensors.
    """

    requests: Sequence[ScheduledRequest]
    shape: BatchDescriptor
    hidden_states: Tensor
    token_ids: Tensor | None
    acceptance: Acceptance | None
    inputs_for: Callable[[BatchDescriptor], StepInputs]


class StepDrafts(ABC):
    """Drafts of one runner's rows.

    Args:
        rows: the runner's rows.
        never: ids of drafts that are never accepted: tokens that end a text. The token sampled at such a position is
            then the last token of its step, also if it is the same. A step that follows without knowing of the end
            (``ScheduledRequest.follows``) begins with it, so that the state after exactly the text is stored.
        synthetic_rate: probability with which a draft is right whatever was sampled, to measure with dummy weights;
            None: a draft is right if it was sampled.

    Attributes:
        rules: how drafts are laid out.
        state: drafts for each row's next step, and the acceptance of its last drafts, on the device.
    """

    def __init__(
        self,
        rules: DraftRules,
        rows: RowTable,
        page_size: int,
        backend: Backend,
        never: Sequence[int] = (),
        synthetic_rate: float | None = None,
    ) -> None:
        self.rules, self._rows, self._page_size, self._backend = rules, rows, page_size, backend
        last = rows.last_token
        drafts = last.new_zeros(len(last), rules.most if rules.on_device else 0)
        self.state = RowState(last, drafts, torch.zeros_like(last))
        ends = torch.tensor(never, device=last.device) if never else None
        self._acceptance_rule = AcceptanceRule.of(synthetic_rate, ends)

    def follow(self, inputs: StepInputs, follows: Tensor) -> StepInputs:
        """Move a verification step back by the drafts that the previous step rejected. Device work only.

        The host lays such a step out before it knows the acceptance: as if all drafts were accepted.

        Args:
            follows: ``[S]`` int64, 1 for a sequence that follows its step before (``ScheduledRequest.follows``), else
                0. All sequences verify equally many drafts.
        """
        batch, samples = inputs.batch, inputs.samples
        assert batch.verification is not None
        step = follow_step(
            inputs.input_ids,
            batch.positions,
            samples.positions,
            batch.seq_lens,
            inputs.rows,
            follows,
            batch.verification.slots,
            PageTable(self._rows.device_page_table, self._page_size),
            self.state,
            backend=self._backend,
        )
        moved = replace(
            batch,
            positions=step.positions,
            slot_mapping=step.slot_mapping,
            seq_lens=step.seq_lens,
            state_slots=step.state_slots,
        )
        return StepInputs(step.input_ids, moved, replace(samples, positions=step.sample_positions), inputs.rows)

    def accept_alike(self, token_ids: Tensor, inputs: StepInputs) -> tuple[Tensor, Acceptance]:
        """Accept the drafts of a verification, with device work only. The rows remember the acceptance.

        Returns:
            The sequences' tokens ``[T]``, and the acceptance.
        """
        samples, verification = inputs.samples, inputs.batch.verification
        assert verification is not None
        found = accept_drafts(
            token_ids,
            inputs.input_ids,
            samples.seeds,
            samples.positions,
            samples.rows,
            verification.query_len,
            self._acceptance_rule,
            self.state.last_token,
            self.state.num_rejected,
            backend=self._backend,
        )
        return found.token_ids, Acceptance(found.num_accepted, found.last, found.counted)

    def accept(
        self, sampled: Sequence[ScheduledRequest], token_ids: Tensor, samples: SamplingTensors
    ) -> tuple[Tensor, Acceptance] | None:
        """Accept the drafts of any step, and store each row's last token that counts.

        Args:
            sampled: a request for every position that samples (``sampled_positions``).
            token_ids: ``[M]`` int64, sampled there.

        Returns:
            The sequences' tokens ``[M]`` and the acceptance; None if the step has no drafts.
        """
        if not any(request.draft_token_ids for request in sampled):
            return None
        following = [after.draft_token_ids[-1:] for after in sampled[1:]] + [[]]
        drafts = self._ints([draft[0] if draft else NO_DRAFT for draft in following])
        first = [i for i, request in enumerate(sampled) if not request.draft_token_ids]
        rule = self._acceptance_rule
        token_ids, is_right = right_drafts(token_ids, drafts, samples.seeds, samples.positions, rule)
        acceptance = accept(is_right, self._ints(first))
        rows = self._ints([sampled[i].row for i in first])
        self._rows.set_last_tokens(rows, token_ids.index_select(0, acceptance.last))
        return token_ids, acceptance

    def _ints(self, values: list[int]) -> Tensor:
        return device_ints(values, self.state.last_token.device)

    @property
    def static_memory(self) -> dict[str, Tensor]:
        """Return the tensors that captured drafting reads, by name."""
        return {"drafts": self.state.drafts, "rejected drafts": self.state.num_rejected}

    def add_row(self, new: NewRequest) -> None:  # noqa: B027 (drafters without a state of their own do nothing)
        """Start the state of a new request's row."""

    @abstractmethod
    def after_step(self, step: RunStep) -> Tensor:
        """Return drafts ``[N, K]`` int64 for the step's N requests that sampled."""

    @abstractmethod
    def after_full_step(
        self, inputs: StepInputs, hidden_states: Tensor, token_ids: Tensor, acceptance: Acceptance | None
    ) -> Tensor:
        """Return the same for a step in which every sequence decodes, or verifies equally many drafts.

        This is device work only, with nothing from the host, so that a graph holds it. If the step verified drafts, the
        rows remember the new ones.

        Args:
            hidden_states: ``[T, hidden_size]``.
            token_ids: ``[T]`` int64, sampled after each position.
            acceptance: None if every sequence decodes.
        """
