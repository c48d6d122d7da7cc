"""A trained model as a Hugging Face folder, from a live run or from checkpoints."""
