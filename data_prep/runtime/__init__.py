"""Processes, memory and directories of a run of `optimus-data`."""
