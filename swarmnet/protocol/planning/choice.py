"""The sizes of a round, chosen together with the plan.

With a larger batch the exchange, the bubble and the end of a round are a smaller part of it, so
every plan has more tokens a second with it. So the most that can be had is looked for with the
largest batch, and what is found there and with the smallest one is compared at every size. Of what
comes within a tenth of the most, plans come first that outlive the loss of any one machine, then
those that leave none out, then small batches and microbatches.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from swarmnet.protocol.planning.cost import Costs, StageCost
from swarmnet.protocol.planning.model import Cut, Machine
from swarmnet.protocol.planning.search import OUT, Plan, plans_of

WORTH = 1.1
"""So much quicker must something be that costs something else."""
COMPARED = 8
"""Plans of a search that are compared at all sizes, and as many that outlive a loss."""


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """Samples."""

    global_batch: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Way:
    """To have peers on the machines."""

    peers: Sequence[Machine]
    owners: Sequence[Hashable]
    """Of each, the machine that it is lost with."""

    def outlives(self, plan: Plan) -> bool:
        """The loss of any one machine."""
        return all(
            len({self.owners[i] for i in plan.replicas(k)}) > 1 for k in range(len(plan.cut))
        )


@dataclass(frozen=True, slots=True)
class Chosen:
    """A plan, and what it was chosen from."""

    size: Size
    way: int
    plan: Plan
    outlives: bool
    """The loss of any one machine."""
    most: float
    """Tokens/s of the quickest plan that was found, of any size."""
    quickest: dict[int, float]
    """Of each way, with this size, likewise."""

    @property
    def order(self) -> tuple[bool, int, Size, float]:
        """The least is taken of those that are near the most."""
        rate = self.plan.round.tokens_per_s
        return not self.outlives, self.plan.serves.count(OUT), self.size, -rate


def choose(
    costs: Mapping[Size, Costs],
    ways: Sequence[Way],
    *,
    num_stages: int | None = None,
    cut: Cut | None = None,
) -> Chosen | None:
    """None where nothing fits. `costs`: of all sizes that may be; `num_stages`, `cut`: given
    ones."""
    return _Choosing(costs, ways, num_stages, cut).chosen()


class _Choosing:
    def __init__(
        self,
        costs: Mapping[Size, Costs],
        ways: Sequence[Way],
        num_stages: int | None,
        cut: Cut | None,
    ) -> None:
        self._costs, self._ways, self._sizes = costs, ways, sorted(costs)
        self._given = num_stages, cut
        self._searched: set[Size] = set()
        self._found: dict[tuple[Size, int, Cut, tuple[int, ...]], Plan] = {}

    def chosen(self) -> Chosen | None:
        least, most = self._sizes[0].global_batch, self._sizes[-1].global_batch
        for size in self._sizes:
            if size.global_batch == most:
                self._search(size)
        small = [size for size in self._sizes if size.global_batch == least]
        rates = dict.fromkeys(small, 0.0)
        for (size, *_), plan in self._found.items():
            if size in rates:
                rates[size] = max(rates[size], plan.round.tokens_per_s)
        if any(rates.values()):
            small = [max(rates, key=rates.__getitem__)]
        for size in small:  # all: memory may suffice where fewer microbatches are in flight
            self._search(size)
        while True:
            best = self._best()
            if best is None or best.size in self._searched:
                return best
            self._search(best.size)

    def _best(self) -> Chosen | None:
        """Of what was found so far."""
        if not self._found:
            return None
        most = max(plan.round.tokens_per_s for plan in self._found.values())
        quickest: dict[Size, dict[int, float]] = {}
        for (size, way, _, _), plan in self._found.items():
            of_size = quickest.setdefault(size, {})
            of_size[way] = max(of_size.get(way, 0.0), plan.round.tokens_per_s)
        near = (
            Chosen(size, way, plan, self._ways[way].outlives(plan), most, quickest[size])
            for (size, way, _, _), plan in self._found.items()
            if plan.round.tokens_per_s * WORTH >= most
        )
        return min(near, key=lambda x: x.order)

    def _search(self, size: Size) -> None:
        """Looks for plans of this size, and what those would come to that are of others."""
        if size in self._searched:
            return
        self._searched.add(size)
        num_stages, cut = self._given
        for i, way in enumerate(self._ways):
            plans = plans_of(self._costs[size], way.peers, num_stages=num_stages, cut=cut)
            safe = [p for p in plans if way.outlives(p)]
            for plan in (*plans[:COMPARED], *safe[:COMPARED]):
                self._compare(i, plan)

    def _compare(self, index: int, plan: Plan) -> None:
        """The plan at all sizes."""
        peers = self._ways[index].peers
        mine = [[peers[i] for i in plan.replicas(k)] for k in range(len(plan.cut))]
        for size in self._sizes:
            key = size, index, plan.cut, plan.serves
            if key in self._found:
                continue
            costs, stages = self._costs[size], list[StageCost]()
            for stage, replicas in zip(plan.cut, mine, strict=True):
                cost = costs.stage(*stage, len(plan.cut), replicas)
                if cost is None:
                    break
                stages.append(cost)
            else:
                self._found[key] = Plan(plan.cut, plan.serves, costs.round(stages))
