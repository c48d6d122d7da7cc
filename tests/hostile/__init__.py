"""Peers that lie, against a swarm of honest ones."""
