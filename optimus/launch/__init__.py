"""Start of a process as a rank: environment of any launcher, local ranks, signals."""
