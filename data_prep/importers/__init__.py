"""Token files that other programs wrote, brought into our token arrays (`optimus-data import`)."""
