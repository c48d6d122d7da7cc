"""How far a stage may be behind with gradients of weights, which nobody waits for."""


def most_owed(stage_index: int) -> int:
    """Microbatches of which a stage may owe them; none at the first stage, for whose gradient of
    inputs nobody waits.

    What is owed when a round's last reply has gone is made while the stages before make their last
    backward passes, each of about one such gradient's time, and the first one's of two. What is
    owed beyond that would make the round longer."""
    return stage_index + 1 if stage_index else 0
