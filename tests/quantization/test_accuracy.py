"""The bundled model, quantised while it loads, predicts what the unquantised one does."""

from __future__ import annotations

import math

import torch

from tests.harness import Harness
from weft.assets import MODEL_DIR
from weft.bench.evaluation import read_problems
from weft.config.quantization import ONLINE
from weft.text.tokenizer import Tokenizer


def test_the_bundled_model_online() -> None:
    """Over the tokens of chat prompts; the argmax where the unquantised model finds it twice as likely as the next
    token, since rounding decides between equals. Measured: see docs/quantization.md."""
    tokenizer = Tokenizer.load(MODEL_DIR)
    found = []
    for quantization in (None, ONLINE):
        harness = Harness(MODEL_DIR, quantization=quantization, num_pages=300)
        rows = []
        for problem in read_problems(limit=4):
            tokens = tokenizer.encode(" ".join(message["content"] for message in problem.messages))
            rows.append(harness.run([(harness.sequence(tokens), len(tokens))])[0])
        found.append(torch.cat(rows).log_softmax(-1))
    exact, quantized = found
    kl = (exact.exp() * (exact - quantized)).sum(-1).mean().item()
    agree = (exact.argmax(-1) == quantized.argmax(-1)).float()
    first, second = exact.topk(2).values.unbind(-1)
    sure = first - second > math.log(2)
    print(f"{len(exact)} tokens: KL {kl:.5f}, argmax agrees {agree.mean():.4f}, where sure {agree[sure].mean():.4f}")
    assert kl < 0.02 and agree[sure].mean() > 0.985
