"""What a run began from, as every peer can get it: its files and its initial weights."""
