"""Virtual time, a seeded network and synthetic devices for the production code."""
