"""What peers have left on this machine's disk, and what of it may go."""
