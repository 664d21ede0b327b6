"""Number of parameters, FLOPs and memory of a run, computed before the run starts."""
