"""Calls multiplexed on one byte stream: the channel and its parts."""
