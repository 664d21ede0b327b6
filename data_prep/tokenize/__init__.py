"""Writing of token arrays: plan, files, checkpoints, and exclusion of documents with duplicate
ids."""
