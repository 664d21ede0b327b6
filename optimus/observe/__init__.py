"""Observation of a run: records, the log, files of metrics, progress, health, reports."""
