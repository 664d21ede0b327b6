"""Supervision of runs on several nodes: detection of failures, replacement of nodes, and restarts.
This package imports no torch."""
