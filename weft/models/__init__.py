"""Architectures: a shared decoder, and per family a table of weight names."""
