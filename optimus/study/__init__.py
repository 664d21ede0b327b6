"""Studies: scaling over numbers of nodes, the MoE optimizations, and the planned runs."""
