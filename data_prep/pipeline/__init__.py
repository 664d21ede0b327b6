"""The steps of `optimus-data`: import, tokenize, shuffle, shard, verify and plan."""
