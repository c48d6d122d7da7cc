"""The household of one replica in one exchange: whose contributions its head has in its own.

The uplink of a household carries each shard once. The head of a shard is the first of the household
in the order of those that may be its primary, so the primary's own household has the primary as its
head, and another one a backup, where it has one. The others give it what they contribute, and wait
there for the result. To the primary that is one contribution, whatever rule sums them.

Who is given something says whether it is in its own, and each keeps what it has given: where the
head dies, all that it had go to the primary. Which count there is decided there alone
(`protocol.update.shard_rules.add_part`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from swarmnet.errors import ProtocolViolation
from swarmnet.methods.update import MAX_NEIGHBOURS
from swarmnet.protocol.membership.records import ACTIVE
from swarmnet.protocol.sync_modes import GOSSIP
from swarmnet.protocol.update import robust
from swarmnet.protocol.update.roster import MemberStatus
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.update.exchange.calls import NOTHING, Contribution
from swarmnet.wire import Array


class Neighbours:
    """Of one exchange."""

    def __init__(self, gossip: Gossip, replica: Replica) -> None:
        self._gossip = gossip
        self._replica = replica
        self._heads: dict[int, str] = {}
        """By shard; asked for once, since others act on it."""
        self._came: dict[int, dict[str, tuple[int, Array]]] = {}
        """By shard and neighbour: tokens and gradient, fp32."""
        self._closed: set[int] = set()
        """Shards whose own contribution is made."""
        self.given: set[int] = set()
        """Shards whose own contribution a neighbour has, or may have."""
        self.changed = Condition()

    def gives(self, shards: Iterable[int]) -> None:
        """The own contributions to these go to a neighbour."""
        self.given.update(shards)

    def head(self, shard: int, order: Sequence[str], members: Mapping[str, MemberStatus]) -> str:
        """Of a shard: the first in `order` that lives; empty where no neighbour does. Who is
        leaving gives what it has to the primary, and hears from there."""
        if shard not in self._heads:
            own, neighbours = self._gossip.own, self._living(members)
            there = {own.peer_id, *neighbours}
            is_alone = not neighbours or own.state != ACTIVE
            self._heads[shard] = "" if is_alone else next((p for p in order if p in there), "")
        return self._heads[shard]

    def are_any(self, members: Mapping[str, MemberStatus]) -> bool:
        """Whether the household has somebody else there, or had when that was asked for."""
        return bool(self._heads) or bool(self._living(members))

    def _living(self, members: Mapping[str, MemberStatus]) -> list[str]:
        """Members of the exchange that are of the own household, and give with it."""
        house, view, plan = self._gossip.own.house, self._gossip.view, self._replica.plan
        if not house or plan.is_local or plan.mode == GOSSIP:
            return []
        found = []
        for peer_id, status in sorted(members.items()):
            record = view.get(peer_id)
            is_here = record is not None and record.house == house and record.state == ACTIVE
            if is_here and status.is_waited_for and not status.is_past:
                found.append(peer_id)
        return found[:MAX_NEIGHBOURS]

    def awaited(self, shard: int, members: Mapping[str, MemberStatus]) -> list[str]:
        """Neighbours that live and have something to give yet."""
        came = self._came.get(shard, {})
        living = self._living(members)
        return [p for p in living if p not in came and members[p].declared != 0]

    def _has_nothing(self, members: Mapping[str, MemberStatus]) -> list[str]:
        """Neighbours that have nothing to give, and wait for the result all the same."""
        return [p for p in self._living(members) if members[p].declared == 0]

    async def take(self, shard: int, sender: str, num_tokens: int, gradient: Array) -> bool:
        """A neighbour's contribution, as coded; whether it will be in the own one. What is not
        finite would spoil that."""
        optimizer = self._replica.optimizer

        def work() -> Array | None:
            try:
                values = optimizer.codec.decoded_contribution(shard, gradient)
            except ProtocolViolation:
                return None
            is_sound = robust.is_sound(optimizer.sum_of_squares(values), num_tokens)
            return values if is_sound else None

        values = await self._replica.worker.run(work)
        came = self._came.setdefault(shard, {})
        if sender not in came:
            has_room = len(came) < MAX_NEIGHBOURS
            if values is None or shard in self._closed or not has_room:
                return False
            came[sender] = num_tokens, values
            self.changed.notify_all()
        return True

    async def close(
        self, shard: int, own: Contribution, members: Mapping[str, MemberStatus]
    ) -> tuple[tuple[str, ...], Contribution]:
        """Nothing comes into the own contribution any more. Returns whose are in it beside the
        own, and their sum, in the order of peer ids."""
        self._closed.add(shard)
        came = self._came.pop(shard, {})
        whose = tuple(sorted({*came, *self._has_nothing(members)}))[:MAX_NEIGHBOURS]
        if not came:
            return whose, own
        num_tokens, gradient = own
        parts = {p: values for p, (_, values) in came.items()}
        if gradient is not None:
            parts[self._gossip.own.peer_id] = gradient
        arrays = [parts[p] for p in sorted(parts)]
        total = await self._replica.worker.run(lambda: self._replica.optimizer.sum(arrays))
        tokens = num_tokens + sum(n for n, _ in came.values())
        return whose, (tokens, total) if tokens else NOTHING
