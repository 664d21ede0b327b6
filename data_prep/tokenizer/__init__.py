"""Text to token ids, equal to the reference library."""
