"""A round's update: gradients summed per shard, optimizer state owned, replicated and repaired."""
