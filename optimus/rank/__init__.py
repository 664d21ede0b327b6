"""What one rank holds: its share of the model, groups, states and segments."""
