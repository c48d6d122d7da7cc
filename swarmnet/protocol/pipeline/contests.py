"""How long a flight of a slot keeps other feeders' flights of it out of a replica.

A slot counts once where its flights meet, so the second one is turned away, for as long as the
first one may come back. A flight that takes far longer than others do, and whose feeder says all
the while that it is under way, keeps nobody out: who answers so for ever would stop every round."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from swarmnet.protocol.moments import Deadline
from swarmnet.protocol.pipeline.reservations import DISTRUST_S, MAX_DISTRUSTED
from swarmnet.protocol.pipeline.routing import DEADLINE_FACTOR, FIRST_DEADLINE_S, MIN_DEADLINE_S


@dataclass(slots=True)
class Contests:
    """What one replica has seen of feeders whose flights kept others out. One that let its time
    pass keeps nobody out for `DISTRUST_S`, as with places that lapse (`reservations`)."""

    _distrusted: OrderedDict[str, Deadline] = field(default_factory=OrderedDict)

    def keeps_out(self, feeder: str, began_at: float, usual_s: float, now: float) -> bool:
        """Whether a flight of a feeder that came here at `began_at`, and does not count yet, keeps
        another feeder's out. `usual_s`: that a microbatch is here, with its way through the stages
        after this one; 0 while unknown."""
        most_s = DEADLINE_FACTOR * usual_s if usual_s > 0 else FIRST_DEADLINE_S
        if now - began_at > max(most_s, MIN_DEADLINE_S):
            self._distrusted[feeder] = Deadline.after(now, DISTRUST_S)
            self._distrusted.move_to_end(feeder)
            if len(self._distrusted) > MAX_DISTRUSTED:
                self._distrusted.popitem(last=False)
        until = self._distrusted.get(feeder)
        return until is None or until.is_over(now)
