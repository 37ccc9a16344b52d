"""Parts that Triton kernels of several families share: launches, tiles, tables, elementwise functions."""
