"""Captured graphs: record device work once, replay it with one call.

Job: the ``Graph`` protocol with its two implementations, and the policy of which sizes are captured.
Does not know: models, schedulers, caches.
"""
