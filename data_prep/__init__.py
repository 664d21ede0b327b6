"""Data preparation: text files in, a shuffled and sharded data set of token instances out.

Nothing here imports torch. The format is written down in docs/formats/dataset.md.
"""
