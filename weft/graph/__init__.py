"""Captured graphs: record device work once, replay it with one call, whole or in pieces between split ops.

Job: the ``Graph`` protocol with its two implementations, split ops, pieces, the wrapper that replays them, and the
policy of which sizes are captured and which batch runs how. Does not know: models, schedulers, caches.
"""
