"""Readers of `optimus-data` data sets: instances (token sequences), microbatches, tokenizers."""
