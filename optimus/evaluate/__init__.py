"""Held-out loss of a model, and sampling of text."""
