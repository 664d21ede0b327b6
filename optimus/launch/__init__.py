"""Start of ranks: launcher environment variables, `optimus train --nproc`, and stop signals."""
