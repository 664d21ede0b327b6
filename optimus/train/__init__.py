"""Training runs: the plan, the start, the training loop, the update and the saves."""
