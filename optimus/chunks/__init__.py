"""Model states in flat chunks: where they lie, who holds a shard, when they are resident."""
