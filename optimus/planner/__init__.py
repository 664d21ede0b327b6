"""Parameters, FLOPs and memory of a run, computed before the run is launched."""
