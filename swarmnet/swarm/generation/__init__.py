"""Texts that the model writes while it trains (`swarmnet generate`)."""
