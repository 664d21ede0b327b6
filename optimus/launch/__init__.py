"""Start of a process as a rank: launcher environment, local ranks of `--nproc`, stop signals."""
