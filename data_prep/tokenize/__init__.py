"""Token arrays: their plan, files, checkpoints and duplicate ids."""
