"""Model states in flat chunks: layout, process groups, gradients, optimizer and parameters."""
