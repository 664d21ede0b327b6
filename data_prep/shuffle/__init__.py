"""The order of instances, blends, and the collection of instances in that order."""
