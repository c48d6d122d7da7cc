"""One cost model of a run: what its layers, machines and links come to, and the best plan."""
