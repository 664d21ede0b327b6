"""The benchmarks of `optimus bench`: the time of a training update, and restarts of supervised
runs."""
