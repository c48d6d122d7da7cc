"""Microbatches on their way: routing, feeding, and when a round is drained."""
