"""Bugs to plant in heads with a layer for each draft (Inkling): rows, delays, and states that drafts change."""

from __future__ import annotations

from tests.mutation.mutant import mutant

HEAD = "weft/models/mtp_chain.py"
FUNCTION = "tests/models/test_mtp_chain.py::test_every_layer_is_the_published_function_in_chunks_and_decodes"
GREEDY = "tests/models/test_mtp_chain.py::test_drafts_are_the_greedy_ones_of_the_reference_and_leave_no_state"
SHORT = "tests/models/test_mtp_chain.py::test_drafts_of_a_sequence_shorter_than_the_head"
LOADED = "tests/models/test_mtp_chain.py::test_layers_that_do_not_run_are_not_loaded"
ENGINES = "tests/speculation/test_chained_heads.py::test_drafts_are_the_references"
RANKS = "tests/speculation/test_chained_heads.py::test_on_two_ranks"

CHAINED_HEADS = (
    mutant(
        "layers-without-delay", "a layer reads the output of the layer before at the position before", HEAD,
        "taps[:, 0] = 1.0", "taps[:, 1] = 1.0", FUNCTION,
    ),
    mutant(
        "delay-is-stale", "a chunk leaves its last output to the next one", HEAD,
        "self.taps, None, state, silu=False", "self.taps, None, state.clone(), silu=False", FUNCTION,
    ),
    mutant(
        "rows-before-a-layer", "a layer has no rows before its first position", HEAD, "if self._index:", "if False:",
        FUNCTION,
    ),
    mutant(
        "rows-begin-late", "the first row of layer i has position i", HEAD,
        "batch.positions < self._index", "batch.positions <= self._index", FUNCTION, SHORT,
    ),
    mutant(
        "attention-from-the-first-token", "a layer attends to no row before its first position", HEAD,
        "attention.first_row = index", "attention.first_row = 0", FUNCTION,
    ),
    mutant(
        "inputs-exchanged", "the projection reads the hidden state first", HEAD,
        "[self.hidden_norm(hidden_states), self.embed_norm(embedded)]",
        "[self.embed_norm(embedded), self.hidden_norm(hidden_states)]", FUNCTION,
    ),
    mutant(
        "chain-of-rank-zero", "each rank multiplies its share of a layer's input", HEAD,
        "dim=-1)[self._rank]", "dim=-1)[0]", RANKS,
    ),
    mutant(
        "layer-without-residual", "a layer returns its residual stream", HEAD, "return x + residual", "return x",
        FUNCTION,
    ),
    mutant(
        "layers-of-the-model-alone", "a layer reads the output of the layer before", HEAD,
        "layer.delay(outputs[-1])", "layer.delay(outputs[0])", FUNCTION,
    ),
    mutant(
        "layers-beyond-the-drafts", "layers that make no draft are not loaded", "weft/config/model.py",
        "enumerate(self.mtp_chain[: self.mtp_depth])", "enumerate(self.mtp_chain)", LOADED,
    ),
    mutant(
        "later-layers-skip-drafts", "a draft passes through every layer that makes a later one", HEAD,
        "range(first, num_drafts)", "range(first, first + 1)", GREEDY,
    ),
    mutant(
        "draft-reads-its-own-row", "a later row reads the output of the layer before for the token before", HEAD,
        "before[index - 1]", "after[index - 1]", GREEDY,
    ),
    mutant(
        "drafts-leave-states", "states are as before the drafts", HEAD, "            tensor[places] = values\n",
        "            pass\n", GREEDY,
    ),
    mutant(
        "last-layer-keeps-no-state", "the states of all layers that make later drafts are restored", HEAD,
        "[1 : 1 + len(positions)]", "[1 : len(positions)]", GREEDY,
    ),
    mutant(
        "one-entry-of-a-window", "a window has an entry for each pass", HEAD,
        "torch.stack(list(positions), dim=1)", "torch.stack(list(positions)[:1], dim=1)", GREEDY,
    ),
    mutant(
        "drafts-from-rejected-states", "drafts begin at the state after the last accepted token", HEAD,
        "torch.where(stored > 0, stored, slots)", "slots", GREEDY,
    ),
    mutant(
        "chain-verifies-in-old-states", "after a verification drafts begin at the state of the last accepted token",
        HEAD, "batch.verification.slots.flatten()[last]", "slots[last // batch.verification.query_len]", ENGINES,
    ),
    mutant(
        "slots-of-the-first-sequences", "drafts change the states of their own sequences", HEAD,
        "slots = slots[inputs.sequences]", "slots = slots[: len(last)]", GREEDY,
    ),
)  # fmt: skip
