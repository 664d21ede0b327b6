"""Model, groups, states and segments of a rank, on its device or, for plans, on the meta device."""
