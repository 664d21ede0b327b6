"""The benchmarks of `optimus bench`: the time of an update, and restarts of supervised runs."""
