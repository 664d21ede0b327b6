"""What `optimus bench` measures."""
