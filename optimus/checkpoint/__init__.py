"""Checkpoints: what is on disk, which of it is valid, and loading it."""
