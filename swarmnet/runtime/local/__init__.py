"""Peers of this machine as processes of their own, one alone or a whole swarm."""
