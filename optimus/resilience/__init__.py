"""Detection of non-finite values and of the rank and layer that computed them. The package
`supervision` restarts failed runs on several nodes."""
