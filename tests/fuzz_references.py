"""The models that ``fuzz_engine.py`` compares with: transformers' own, of tiny checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.models.mtp_reference import make_mtp_checkpoint
from tests.speculation.conftest import make_repeating_checkpoint
from tests.tiny import make_checkpoint, make_model
from tests.tiny_tokenizer import EOS_ID, VOCAB_SIZE

REPEATING = "Qwen3NextForCausalLM that repeats itself"
"""Its greedy texts go in circles, and its head is often right."""
ARCHITECTURES = (REPEATING, "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3ForCausalLM")
WITH_HEAD = (REPEATING, "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM")


class Reference:
    """transformers' model of one architecture, and the folder that Weft loads it from."""

    def __init__(self, arch: str, folder: Path) -> None:
        self.has_head = arch in WITH_HEAD
        if arch == REPEATING:
            self.folder = make_repeating_checkpoint("Qwen3NextForCausalLM", folder, head=True)
            self._model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
            return
        if self.has_head:
            self.folder, _ = make_mtp_checkpoint(arch, folder, with_tokenizer=True)
        else:
            self.folder = make_checkpoint(arch, folder, with_tokenizer=True)
        self._model = make_model(arch, vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """``[len(tokens), V]``: after each token."""
        with torch.no_grad():
            return self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
