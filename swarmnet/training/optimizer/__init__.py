"""Steps on parameters: AdamW on shards, own steps, outer steps, and where state lies."""
