"""Checkpoints: file formats, saving, loading, weights, and the checkpoints of a run."""
