"""The update of a round: gradients averaged per shard, optimizer state owned, repaired and
handed over, parameters that a replica lacks fetched."""
