"""Tensor parallelism: ranks and collectives."""
