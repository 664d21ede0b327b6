"""Reading data sets written by `optimus-data`: by instance number, and by update and rank."""
