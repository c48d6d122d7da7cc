"""The ids of runs, as they are for ever.

`run_ids.json` has, for each spec, its canonical text, the run's id, and the id that swarmnet 0.1
gave it. The ids of 0.1 were computed with 0.1. A spec in `specs/` or `examples/` that the file
lacks is added by

    python -m tests.golden

which changes no entry that is there.

`state_0_1/state` is the state folder of a peer of swarmnet 0.1 that was killed in round 7 of the
run in `state_0_1/run.toml`, made with 0.1's code: its checkpoint of round 6, the peers it met, and
the microbatches that it counted.
"""
