"""How a process becomes a rank: environment of any launcher, local ranks, signals."""
