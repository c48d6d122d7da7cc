"""What a peer serves: a copy of a stage, the round that it is in, and how it gets to the next."""
