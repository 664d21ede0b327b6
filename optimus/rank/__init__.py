"""Model, model states and segments of a rank. Plans create them on the meta device."""
