"""Input files and the documents that they contain."""
