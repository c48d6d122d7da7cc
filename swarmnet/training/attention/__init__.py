"""Attention of which torch has no public form: in blocks, and of documents that share a sample."""
