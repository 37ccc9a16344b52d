"""Speculative decoding: drafts, which requests get some, and which of them are accepted."""
