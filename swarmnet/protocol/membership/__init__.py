"""The members of a run: their records, their stages, and how lost members are found again."""
