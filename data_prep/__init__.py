"""Data preparation: text files become a shuffled and sharded data set of token instances.

No module imports torch. docs/formats/dataset.md describes the format.
"""
