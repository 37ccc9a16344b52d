"""Different numbers of drafts for different batch sizes: the same tokens, each size in its own graph, no slot lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import assert_idle
from tests.models.mtp_reference import make_mtp_checkpoint
from tests.speculation.conftest import Case
from tests.whole import takes_long
from tests.x_matrix import runner_of
from weft import LLM, SamplingParams
from weft.config.speculation import SpeculativeConfig
from weft.models.mtp import DraftInputs, MtpDrafter

LIMITS = ((1, 3), (2, 1))


@pytest.mark.parametrize("method", ["mtp", pytest.param("ngram", marks=takes_long)])
def test_tokens_and_graphs(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch shrinks from four requests, which get no drafts, to one. The head runs as often as there are drafts,
    and sees as far behind the tokens of a step as it drafts."""
    runs: set[tuple[int, int]] = set()
    draft = MtpDrafter.draft

    def noted(self: MtpDrafter, inputs: DraftInputs, num_drafts: int) -> torch.Tensor:
        if inputs.sequences is None:
            runs.add((inputs.batch.num_seqs, num_drafts))
        else:
            assert inputs.batch.max_seq_len >= int(inputs.batch.seq_lens.max()) + max(0, num_drafts - 1)
        return draft(self, inputs, num_drafts)

    monkeypatch.setattr(MtpDrafter, "draft", noted)
    folder, _ = make_mtp_checkpoint("Qwen3NextForCausalLM", tmp_path)
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 9) for _ in range(n)] for n in (9, 5, 14, 7)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (50, 34, 18, 9)]
    case = Case(prompts, params)
    settings = {"max_num_seqs": 4, "page_size": 4, "skip_tokenizer_init": True, "max_num_batched_tokens": 64}
    with LLM(str(folder), **settings) as plain:
        expected = [done.token_ids for done in case.run(plain)]
    config = SpeculativeConfig(method, 3, 1, 3, drafts_by_batch=LIMITS)
    graphs = {"cuda_graph_mode": "FULL", "cuda_graph_bs": [1, 2, 4]}
    with LLM(str(folder), **settings, **graphs, speculative_config=config) as llm:
        assert llm._core.plan.num_slots - 1 >= 4
        assert [done.token_ids for done in case.run(llm)] == expected
        verify = runner_of(llm).graphs.verification
        assert verify is not None and verify.sizes == [1, 2] and verify.counters.replays > 5
        assert llm.stats().spec_decode_num_drafts and runner_of(llm).graphs.decode.counters.replays
        Case([[5, 6, 7]], params[3:]).run(llm)
        assert_idle(llm)
    assert runs == ({(1, 3), (2, 1), (4, 0)} if method == "mtp" else set())
