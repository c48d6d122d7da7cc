"""Async code of a peer: gossip, the path of a microbatch, rounds, averaging, state sync."""
