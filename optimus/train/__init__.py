"""Training runs: planning, start-up, the training loop, updates and checkpoint saves."""
