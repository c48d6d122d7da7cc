"""Ranks of one machine in rows: a row cuts matrices, and rows share samples or positions."""
