"""The chunk length of layers that keep a state instead of keys and values."""

CHUNK_SIZE = 64
"""Upper bound on tokens per chunk, and the distance between the states that a prefill can store without an extra
boundary."""
