"""Triton kernels: ``x_triton`` for each operation ``x`` of ``weft/ops``, with the parameters of its torch reference."""
