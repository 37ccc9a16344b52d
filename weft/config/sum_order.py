"""Limits of attention kernels on which the order of a token's sums depends (``--deterministic``).

Job: name them for the settings and the scheduler, which know no kernels.
"""

LONGER_SPLITS_FROM = 8192
"""Tokens of a sequence beyond which attention adds keys in longer splits, and eight times so many again."""

MOST_QUERY_ROWS = 32
"""Query tokens times heads of a group that attention of a verification can have: as many as were measured. Triton has
miscompiled products of 64 rows on Hopper (flash-linear-attention issues 640 and 984)."""
