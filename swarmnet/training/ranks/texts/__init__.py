"""Texts that several ranks of one machine write together."""
