"""`swarmnet plan`: machines as people name them, the question, and the answer."""
