"""Calls between peers: the port (`base`) and its implementations."""
