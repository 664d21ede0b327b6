"""Process groups, collectives, the mesh of ranks, and the agreement of ranks on why a run ends."""
