"""What carries streams: hivemind's p2pd, or py-libp2p."""
