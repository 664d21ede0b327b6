"""Search for input files, and readers of the documents in input files."""
