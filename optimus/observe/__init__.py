"""Observation of a training run: records, log, metrics files, progress, health checks, report."""
