"""Models as lists of layers: the protocol for any model, and Llama."""
