"""Reading of data sets written by `optimus-data`: instances, microbatches of ranks, tokenizers."""
