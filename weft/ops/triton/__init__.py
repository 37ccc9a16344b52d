"""Triton kernels, one file per operation, each with the signature of its torch reference in ``weft/ops``."""
