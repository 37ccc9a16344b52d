"""What kinds of layers share whose state decays by one number per head and token (Mamba-2, lightning attention)."""

CHUNK_SIZE = 64
"""Longest chunk of the chunked form, in tokens."""
