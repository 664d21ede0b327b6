"""Writing of token arrays: plan, files, checkpoints and exclusion of duplicate document ids."""
