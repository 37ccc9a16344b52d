"""``weft eval`` of the bundled model on two ranks: the replies of one, a sample of them."""

from __future__ import annotations

from tests.ranks import fork_ranks
from weft import LLM
from weft.evaluation import ask, read_problems


def test_two_ranks_reply_as_one() -> None:
    problems = read_problems()[::40]
    with LLM(max_num_seqs=8) as llm:
        want = [verdict.reply for verdict in ask(llm, problems, use_tqdm=False)]
    with fork_ranks(), LLM(max_num_seqs=8, tensor_parallel_size=2) as llm:
        assert [verdict.reply for verdict in ask(llm, problems, use_tqdm=False)] == want
