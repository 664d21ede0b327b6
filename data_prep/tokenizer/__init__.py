"""Encoding of text to the same token ids as the tokenizers and sentencepiece libraries."""
