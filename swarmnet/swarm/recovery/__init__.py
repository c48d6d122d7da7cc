"""When peers die, leave or come back: handover, lost samples, downloads, checkpoints."""
