"""Adds new specs to `run_ids.json`."""

from tests.golden.run_ids import add_missing

if __name__ == "__main__":
    add_missing()
