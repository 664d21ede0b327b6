"""Benchmarks of an update: comparison with plain torch, times on several ranks, and a profile."""
