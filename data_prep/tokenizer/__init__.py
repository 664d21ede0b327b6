"""Encoding of text to token ids, with the ids of the tokenizers and sentencepiece libraries."""
