"""When replicas exchange what, who owns which shard, and how contributions are summed."""
