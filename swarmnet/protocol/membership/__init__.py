"""Who is in the run, where each serves, and how lost members are found again."""
