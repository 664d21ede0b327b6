"""Offloading of the model states of any torch module, for training on one device."""

from optimus.offloading.optimizer import OffloadOptimizer, offload

__all__ = ["OffloadOptimizer", "offload"]
