"""The parts of a stage that make passes: layers, kept microbatches, backward passes, checks."""
