"""What a machine's owner lets a peer take."""
