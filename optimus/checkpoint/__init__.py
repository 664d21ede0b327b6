"""Checkpoints: file formats, saves, loads, readers of weights, and the checkpoints of a run."""
