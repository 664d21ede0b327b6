"""One rank: its model, groups, states and segments; on a device for training, on meta for plans."""
