"""Seats of a machine that compute in processes of their own."""
