"""Conversion between text and tokens: tokenizer, detokenizer, chat template."""
