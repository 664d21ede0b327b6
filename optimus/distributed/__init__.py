"""Ranks, groups, collectives and the agreement on the end of a run; no models, no data."""
