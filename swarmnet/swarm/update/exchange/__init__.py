"""One exchange of a stage: contributions, sums, steps and results."""
