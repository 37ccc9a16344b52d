"""Capture in pieces and torch.compile: the sources of pieces, splits by name, measured modes, pictures of pieces.

An engine imports this package only if its settings ask for one of these (``runner/model_runner.py``).
"""
