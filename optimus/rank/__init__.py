"""Model, model states and segments of a rank."""
