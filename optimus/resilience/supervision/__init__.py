"""Supervision of runs on several nodes: detect failures, replace nodes, resume. Needs no torch."""
