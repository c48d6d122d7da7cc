"""The application: the `swarmnet` command and what it composes."""
