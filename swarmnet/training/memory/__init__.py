"""What a stage keeps in memory: the plan, activations, copies on other devices."""
