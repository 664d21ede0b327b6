"""Held-out loss and sampling."""
