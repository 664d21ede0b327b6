"""Detection of non-finite values, and of the rank and layer that computed them."""
