"""Training of a model: planning of a run, its start-up, the training loop, updates (optimizer
steps) and checkpoint saves."""
