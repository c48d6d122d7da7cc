"""When peers die, leave or come back: downloads, checkpoints, saved models."""
