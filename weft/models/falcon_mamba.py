"""FalconMamba (arXiv 2410.05355): Mamba alone, with plain norms over B, C and the time steps; no KV cache.

Job: the weight-name table. Does not know: anything that ``decoder.py`` and the config express.
"""

from __future__ import annotations

from weft.config.mamba import MambaConfig
from weft.layers.mamba import Mamba
from weft.models.decoder import CausalLM
from weft.models.mamba2 import Mamba2ForCausalLM


class FalconMambaForCausalLM(CausalLM):
    """The published names are Mamba-2's."""

    mixers = CausalLM.mixers | {MambaConfig: Mamba}
    weight_table = Mamba2ForCausalLM.weight_table
