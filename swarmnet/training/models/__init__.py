"""Models that can be cut into stages."""
