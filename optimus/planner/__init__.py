"""Predictions about a run before it starts: parameters, FLOPs, memory, step time and node-hours;
and the search for layouts and placements of model states."""
