"""Captured graphs: record device work once, replay it with one call.

Job: the ``Graph`` protocol and its two implementations, sets of graphs by size, split ops, the sizes that are captured,
and the choice of a graph for a batch. Does not know: models, schedulers, caches.
"""
