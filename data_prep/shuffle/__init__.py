"""The order of instances, blends of several sources, and readers of instances in this order."""
