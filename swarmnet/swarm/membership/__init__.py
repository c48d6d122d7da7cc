"""Knowing the other peers: gossip, detection of failures, the directory, links and relays."""
