"""Token arrays: their plan, files, checkpoints and unique ids."""
