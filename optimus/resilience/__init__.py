"""Noticing that something is wrong before it spreads."""
