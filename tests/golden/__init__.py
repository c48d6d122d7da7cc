"""The ids of runs, as they are for ever.

`run_ids.json` has, for each spec, its canonical text and the run's id. A spec in `specs/` or
`examples/` that the file lacks is added by

    python -m tests.golden

which changes no entry that is there.
"""
