"""Encoders of text to token ids. The ids are equal to the ids from the tokenizers library or the
sentencepiece library."""
