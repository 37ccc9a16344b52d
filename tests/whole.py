"""Whether every test runs (``make test-all``, the GPU tier), or the part that ``make test`` chooses."""

import os

import pytest

WHOLE = bool(os.environ.get("WEFT_WHOLE_MATRIX"))
"""Whether every case runs. Without it each matrix runs the part that it names."""

RUNS_LONG = WHOLE or bool(os.environ.get("WEFT_LONG_TESTS"))
"""Whether tests that take long run, also where a matrix runs in part, as for planted bugs (``make mutate``)."""

takes_long = pytest.mark.skipif(not RUNS_LONG, reason="takes long; runs in make test-all")
"""For a test of ten seconds or more, whose subject has quicker tests too."""
