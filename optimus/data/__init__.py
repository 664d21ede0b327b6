"""Reading of the data sets that `optimus-data` writes: instances, microbatches and tokenizers."""
