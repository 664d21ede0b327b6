"""The order of instances, blends of several sources, and reads of instances in their order."""
