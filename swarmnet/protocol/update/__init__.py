"""The schedule of exchanges, the owners of shards, and the sums of contributions."""
