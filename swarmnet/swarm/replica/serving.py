"""Which stage a peer serves at present, for all that work for whichever it is."""

from __future__ import annotations

from swarmnet.errors import NotReady
from swarmnet.swarm.replica.replica import Replica


class Serving:
    """The replica that a peer serves; none between two stages, and while it stands by."""

    def __init__(self) -> None:
        self.replica: Replica | None = None

    def begin(self, replica: Replica) -> None:
        """It serves this one from now on."""
        self.replica = replica

    def end(self) -> None:
        """It serves none any more."""
        self.replica = None

    def of(self, stage_index: int) -> Replica:
        """The replica of a stage here. Raises `NotReady` where that stage is not served."""
        if self.replica is None or self.replica.index != stage_index:
            raise NotReady(f"stage {stage_index} is not served here")
        return self.replica
