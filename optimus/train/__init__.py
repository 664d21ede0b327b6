"""The training run: its plan, its start, the loop, one update, and saves."""
