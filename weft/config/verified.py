"""The verification of each architecture against its reference implementation in ``transformers``.

``weft models`` prints the table. ``tests/cli/test_models.py`` compares it with the tests' own lists.
"""

import difflib
from dataclasses import dataclass
from enum import StrEnum

_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration")


class Ranks(StrEnum):
    """The verification of tensor parallelism."""

    ENGINE = "whole engine"
    """Engines of two ranks (some also of four) give the tokens of one rank
    (``tests/executor/test_tensor_parallel.py``)."""
    LAYERS = "by layer"
    """Each kind of layer gives the same on several ranks as on one (``tests/layers/test_tensor_parallel.py``, or in
    engines of another architecture)."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Verification beyond that of every architecture: logits within 1e-4 in float32 on the CPU, and equal greedy tokens
    (``tests/models/test_parity.py``).

    Attributes:
        gpu: verified on an H200: greedy tokens equal in float32, logits within 5e-4 of float64, and in bfloat16 no
            further from float32 than ``transformers`` is (``tests/gpu/test_parity.py``,
            ``tests/gpu/test_precision.py``, with images ``tests/gpu/test_vision.py``).
        ranks: verified with tensor parallelism.
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
    "BailingHybridForCausalLM": Verified(True, Ranks.LAYERS),
    "Glm5NextForConditionalGeneration": Verified(True, Ranks.LAYERS),
    "Qwen3NextForCausalLM": Verified(True, Ranks.ENGINE),
    "Qwen3_5ForCausalLM": Verified(True, Ranks.ENGINE),
    "Qwen3_5MoeForCausalLM": Verified(True, Ranks.ENGINE),
    "Qwen3_5ForConditionalGeneration": Verified(True, Ranks.LAYERS),
    "Qwen3_5MoeForConditionalGeneration": Verified(True, Ranks.LAYERS),
    "Qwen4ExpForCausalLM": Verified(True, Ranks.LAYERS),
    "Qwen4ExpForConditionalGeneration": Verified(True, Ranks.LAYERS),
    "Qwen3VLForConditionalGeneration": Verified(True, Ranks.LAYERS),
    "Qwen3VLMoeForConditionalGeneration": Verified(True, Ranks.LAYERS),
    "Lfm2ForCausalLM": Verified(True, Ranks.LAYERS),
    "Lfm2MoeForCausalLM": Verified(True, Ranks.LAYERS),
    "Lfm3ForCausalLM": Verified(True, Ranks.LAYERS),
    "BambaForCausalLM": Verified(True, Ranks.LAYERS),
    "FalconH1ForCausalLM": Verified(True, Ranks.LAYERS),
    "GraniteMoeHybridForCausalLM": Verified(True, Ranks.LAYERS),
    "NemotronHForCausalLM": Verified(True, Ranks.LAYERS),
    "JambaForCausalLM": Verified(True, Ranks.ENGINE),
    "FalconMambaForCausalLM": Verified(True, Ranks.LAYERS),
    "MambaForCausalLM": Verified(True, Ranks.LAYERS),
    "MiniMaxForCausalLM": Verified(True, Ranks.ENGINE),
    "ZambaForCausalLM": Verified(True, Ranks.LAYERS),
    "Zamba2ForCausalLM": Verified(True, Ranks.ENGINE),
    "ZayaForCausalLM": Verified(True, Ranks.ENGINE),
    "Mamba2ForCausalLM": Verified(True, Ranks.LAYERS),
    "Gemma3ForCausalLM": Verified(True, Ranks.ENGINE),
    "RecurrentGemmaForCausalLM": Verified(True, Ranks.LAYERS),
    "GptOssForCausalLM": Verified(True, Ranks.LAYERS),
    "KimiLinearForCausalLM": Verified(True, Ranks.LAYERS),
    "InklingForCausalLM": Verified(True, Ranks.ENGINE),
    "Inkling2ForCausalLM": Verified(True, Ranks.ENGINE),
    "OlmoHybridForCausalLM": Verified(True, Ranks.ENGINE),
}


def nearest(name: str) -> str:
    """The supported architecture with the name most similar to ``name``, of those with the same first letter if there
    are some."""

    def stem(architecture: str) -> str:
        for suffix in _SUFFIXES:
            architecture = architecture.removesuffix(suffix)
        return architecture.lower()

    def similarity(known: str) -> tuple[bool, float]:
        first, second = stem(known), stem(name)
        return first[:1] == second[:1], difflib.SequenceMatcher(None, first, second).ratio()

    return max(VERIFIED, key=similarity)
