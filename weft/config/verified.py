"""What was verified of each architecture against its reference implementation in ``transformers``.

Job: the table behind ``weft models``, held to the tests' own lists by ``tests/cli/test_models.py``, and the supported
architecture that is nearest to another name. Does not know: geometries.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import StrEnum

_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration")


class Ranks(StrEnum):
    """How far tensor parallelism is verified."""

    ENGINE = "whole engine"
    """Engines of two ranks (a sample of them: four) give one rank's tokens
    (``tests/executor/test_tensor_parallel.py``)."""
    LAYERS = "by layer"
    """Each kind of layer gives on several ranks what it gives on one (``tests/layers/test_tensor_parallel.py``, or in
    engines of another architecture)."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Logits within 1e-4 in float32 on the CPU, greedy tokens equal: all have that (``tests/models/test_parity.py``).

    Attributes:
        gpu: on an H200, the same in float32, and in bfloat16 no further from float32 than ``transformers`` is
            (``tests/gpu/test_parity.py``, ``tests/gpu/test_precision.py``), but for what ``NOT_ON_A_GPU`` names.
        ranks: with tensor parallelism.
    """

    gpu: bool
    ranks: Ranks


VERIFIED: dict[str, Verified] = {
    "LlamaForCausalLM": Verified(True, Ranks.ENGINE),
    "MistralForCausalLM": Verified(True, Ranks.LAYERS),
    "Qwen2ForCausalLM": Verified(True, Ranks.LAYERS),
    "Qwen2MoeForCausalLM": Verified(True, Ranks.LAYERS),
    "Qwen3ForCausalLM": Verified(True, Ranks.ENGINE),
    "Qwen3MoeForCausalLM": Verified(True, Ranks.ENGINE),
    "Qwen3NextForCausalLM": Verified(True, Ranks.ENGINE),
    "Qwen3_5ForCausalLM": Verified(True, Ranks.ENGINE),
    "Qwen3_5MoeForCausalLM": Verified(True, Ranks.ENGINE),
    "Qwen3_5ForConditionalGeneration": Verified(True, Ranks.LAYERS),
    "Qwen3_5MoeForConditionalGeneration": Verified(True, Ranks.LAYERS),
    "Qwen3VLForConditionalGeneration": Verified(False, Ranks.LAYERS),
    "Qwen3VLMoeForConditionalGeneration": Verified(False, Ranks.LAYERS),
    "Lfm2ForCausalLM": Verified(True, Ranks.LAYERS),
    "Lfm2MoeForCausalLM": Verified(True, Ranks.LAYERS),
    "BambaForCausalLM": Verified(False, Ranks.LAYERS),
    "FalconH1ForCausalLM": Verified(False, Ranks.LAYERS),
    "GraniteMoeHybridForCausalLM": Verified(False, Ranks.LAYERS),
    "NemotronHForCausalLM": Verified(False, Ranks.LAYERS),
    "JambaForCausalLM": Verified(False, Ranks.ENGINE),
    "FalconMambaForCausalLM": Verified(False, Ranks.LAYERS),
    "MiniMaxForCausalLM": Verified(False, Ranks.ENGINE),
    "Mamba2ForCausalLM": Verified(False, Ranks.LAYERS),
    "Gemma3ForCausalLM": Verified(True, Ranks.ENGINE),
    "GptOssForCausalLM": Verified(False, Ranks.LAYERS),
    "KimiLinearForCausalLM": Verified(True, Ranks.LAYERS),
    "OlmoHybridForCausalLM": Verified(True, Ranks.ENGINE),
}


NOT_ON_A_GPU = "Families with Mamba or lightning layers have been compared on a GPU in float32 alone."


def nearest(name: str) -> str:
    """The supported architecture whose name is most like ``name``."""

    def stem(architecture: str) -> str:
        for suffix in _SUFFIXES:
            architecture = architecture.removesuffix(suffix)
        return architecture.lower()

    return max(VERIFIED, key=lambda known: difflib.SequenceMatcher(None, stem(known), stem(name)).ratio())
