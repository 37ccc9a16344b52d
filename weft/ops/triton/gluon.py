"""Whether kernels in Gluon can be used: an experimental part of Triton, it may change with any version."""

from __future__ import annotations

import triton

from weft.triton_version import is_known

GLUON_IS_KNOWN = is_known(triton.__version__)
"""Without it other kernels do the work."""
