"""The update of a round: gradients averaged per shard, optimizer state owned and repaired."""
