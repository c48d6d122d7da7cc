"""What runs on the device: models, stages, shards, data. No network."""
