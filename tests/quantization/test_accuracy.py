"""The bundled model, quantised while it loads, predicts what the unquantised one does.

``python -m tests.quantization.test_accuracy --prompts 24 --form int4 --json FILE`` writes figures of
docs/quantization.md.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

import torch

from tests.harness import Harness
from weft.assets import MODEL_DIR
from weft.bench import report
from weft.bench.evaluation import read_problems
from weft.config.quantization import ONLINE_FORMS
from weft.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Agreement:
    """How the likeliest tokens of two models agree.

    Attributes:
        kl: mean divergence of the quantised model from the exact one, over all tokens.
        share_equal: tokens whose likeliest next token is the same.
        share_equal_where_sure: the same, of tokens whose likeliest next token is twice as likely as the second.
        other_second_share, other_third_share: of the other tokens, those where the quantised model chose the exact
            model's second, or its second or third choice.
        other_close_share: of the other tokens, those where the exact model gives the quantised model's choice at least
            half of the probability of its own.
        other_p, equal_p: median probability of the exact model's choice, for the other tokens and for the equal ones.
    """

    num_prompts: int
    num_tokens: int
    kl: float
    share_equal: float
    share_equal_where_sure: float
    other_second_share: float
    other_third_share: float
    other_close_share: float
    other_p: float
    equal_p: float


def agreement(num_prompts: int, form: str = "fp8") -> Agreement:
    """Compare the model with itself, quantised online, over the tokens of chat prompts."""
    tokenizer = Tokenizer.load(MODEL_DIR)
    found = []
    for quantization in (None, ONLINE_FORMS[form]):
        harness = Harness(MODEL_DIR, quantization=quantization, num_pages=2000, num_slots=num_prompts + 2)
        rows = []
        for problem in read_problems(limit=num_prompts):
            tokens = tokenizer.encode(" ".join(message["content"] for message in problem.messages))
            rows.append(harness.run([(harness.sequence(tokens), len(tokens))])[0])
        found.append(torch.cat(rows).log_softmax(-1))
    exact, quantized = found
    chosen = quantized.argmax(-1)
    (first, second), of_chosen = exact.topk(2).values.unbind(-1), exact.gather(1, chosen[:, None])[:, 0]
    equal, rank = exact.argmax(-1) == chosen, (exact > of_chosen[:, None]).sum(-1)
    sure = (first - second).exp() > 2

    def share(which: torch.Tensor) -> float:
        return round(which.float().mean().item(), 4)

    return Agreement(
        num_prompts=num_prompts,
        num_tokens=len(exact),
        kl=round((exact.exp() * (exact - quantized)).sum(-1).mean().item(), 4),
        share_equal=share(equal),
        share_equal_where_sure=share(equal[sure]),
        other_second_share=share(rank[~equal] == 1),
        other_third_share=share(rank[~equal] <= 2),
        other_close_share=share((first - of_chosen)[~equal].exp() <= 2),
        other_p=round(first[~equal].exp().median().item(), 2),
        equal_p=round(first[equal].exp().median().item(), 2),
    )


def test_the_bundled_model_online() -> None:
    """Shares are of all tokens. Rounding decides between about equally likely tokens, so the others are such tokens."""
    found = agreement(4)
    print(found)
    assert found.kl < 0.02 and found.share_equal > 0.95 and found.share_equal_where_sure > 0.985
    assert found.other_close_share > 0.7 and found.other_third_share > 0.9 and found.other_p < 0.4


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the bundled model with itself, quantised.")
    parser.add_argument("--form", choices=ONLINE_FORMS, default="fp8")
    parser.add_argument("--prompts", type=int, default=24, metavar="N")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    target = report.open_json(args.json)
    figures = asdict(agreement(args.prompts, args.form))
    print(json.dumps(figures, indent=1))
    report.write_json(target, {"benchmark": f"{args.form}-agreement"} | report.provenance("cpu") | figures)


if __name__ == "__main__":
    main()
