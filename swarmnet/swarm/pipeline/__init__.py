"""Microbatches on their way: feeders, wiring, and the steps of a stage."""
