"""A whole peer, composed of real parts, without a command line (`swarmnet.run_peer`)."""
