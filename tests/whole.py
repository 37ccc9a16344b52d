"""Whether every test runs (``make test-all``, the GPU tier), or the part that ``make test`` chooses."""

import os

import pytest

WHOLE = bool(os.environ.get("WEFT_WHOLE_MATRIX"))
"""Whether every case runs. Without it each matrix runs the part that it names."""

takes_long = pytest.mark.skipif(not WHOLE, reason="takes long; runs in make test-all")
"""For a test of half a minute, whose subject has quicker tests too."""
