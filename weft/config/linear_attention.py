"""Linear attention with one decay per head and token (Mamba-2, lightning attention): its chunk length."""

CHUNK_SIZE = 64
"""Longest chunk of the chunked form, in tokens."""
