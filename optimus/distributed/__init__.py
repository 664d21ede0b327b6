"""Ranks, process groups, collectives, and the agreement of ranks on how a run ends."""
