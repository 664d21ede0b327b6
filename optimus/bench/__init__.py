"""Measurements of an update: against a plain torch loop, on several ranks, and by module."""
