"""Falcon-H1 (arXiv 2507.22448): attention and Mamba-2 side by side in every layer, dense MLPs, many multipliers.

Job: nothing beyond Bamba's weight-name table. Does not know: anything that ``decoder.py`` and the config express.
"""

from __future__ import annotations

from weft.models.bamba import BambaForCausalLM


class FalconH1ForCausalLM(BambaForCausalLM):
    """The published names are Bamba's."""
