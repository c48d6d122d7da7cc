"""Ports that a router forwards to this machine because it is asked to."""
