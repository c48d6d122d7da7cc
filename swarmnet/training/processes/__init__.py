"""Processes that compute for a peer: its ranks, and stages that are not in its own process."""
