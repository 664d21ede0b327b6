"""Resources that a run needs, computed before it is launched."""
