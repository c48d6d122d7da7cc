"""The pages of `docs/reference/`, made from the code that they tell of.

    python -m tests.reference

writes them; a test fails when one is not as it would be written.
"""
