"""Ownership of pages and state slots. Ids only: tensors live in ``weft/runner``."""
