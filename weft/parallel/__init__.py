"""Tensor parallelism: ranks, collectives and the arithmetic of sharding."""
