"""Ranks, groups and collectives. Nothing here knows of models or data."""
