"""Ranks, process groups, collectives, and the agreement on the end of a run."""
