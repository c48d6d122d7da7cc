"""The directory: a peer that knows one address finds peers of every stage in a DHT.

It is a Kademlia DHT (hivemind's `DHTNode`, in our own event loop, over the daemon that carries our
channels too). Under `swarmnet/<run id>/stage/<k>` are the signed records of that stage's peers,
each under its peer id; they expire and are refreshed. What is found is checked like any gossip:
nothing in the DHT is trusted. Peers without a daemon have others publish for them
(`protocol.membership.publishers`), and hear by gossip of what these find."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

from swarmnet.errors import SwarmnetError
from swarmnet.methods.records import SignedRecord
from swarmnet.protocol.dialing.addresses import of_all, peer_of
from swarmnet.protocol.membership.publishers import published_for
from swarmnet.protocol.membership.records import LEFT, OBSERVER_STAGE
from swarmnet.protocol.moments import Deadline, Since
from swarmnet.protocol.timing import ANSWER_S, CONNECT_S, LAPSES, PATIENCE_S, UPKEEP_S
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.wire import pack, unpack

log = logging.getLogger("swarmnet.discovery")

REFRESH_S = UPKEEP_S
EXPIRY_S = LAPSES * REFRESH_S
MAX_CONNECTED = 8
"""Addresses of known peers through which the DHT is joined."""
MAX_GONE = 1024
"""Peers in the tables of hivemind's node beyond those of the view; with more, another node takes
its place. It forgets nobody: whom it did not reach it counts for ever, and whom it asked whether
they live."""
MAX_FOUND = 64
"""Records taken from one key."""


def stage_key(run_id: str, stage_index: int) -> str:
    """The DHT key under which a stage's peers are found."""
    return f"swarmnet/{run_id}/stage/{stage_index}"


class Directory:
    """Publishes the own record, and finds those of others."""

    def __init__(
        self, gossip: Gossip, num_stages: int, p2p: Callable[[], Any], rng: random.Random
    ) -> None:
        self._gossip = gossip
        self._num_stages = num_stages
        self._p2p = p2p
        self._rng = rng
        self._node: Any = None
        self._initial: list[str] = []
        self._published = [gossip]
        self._stale = False
        self._rejoined = Since()

    async def start(self, initial_peers: Sequence[str]) -> None:
        """Joins the DHT through known addresses; none for the first peer of a run."""
        from hivemind.dht.node import DHTNode

        await asyncio.gather(*(self._connect(a) for a in initial_peers[:MAX_CONNECTED]))
        # Of those that answer: one that is gone would be waited for.
        connected = self._gossip.transport.connected()
        self._initial = [a for a in initial_peers if peer_of(a) in connected][:MAX_CONNECTED]
        self._node = await DHTNode.create(
            p2p=self._p2p(),
            initial_peers=self._initial,
            ensure_bootstrap_success=False,
            num_workers=2,
            strict=False,
        )

    def also(self, gossip: Gossip) -> None:
        """Publishes the record of another seat of this machine too."""
        self._published.append(gossip)

    def without(self, gossip: Gossip) -> None:
        """That seat has left."""
        self._published.remove(gossip)

    async def _connect(self, address: str) -> None:
        """hivemind's DHT talks only to peers that the daemon has a connection to."""
        try:
            await self._gossip.transport.dial(address, CONNECT_S)
        except SwarmnetError as e:
            log.debug("%s: %s", address, e)

    def daemon_restarted(self) -> None:
        """The daemon is a new one: the DHT node is made again with the next use."""
        self._stale = True

    async def run(self, initial_peers: Sequence[str] = ()) -> None:
        """Joins the DHT, where `start` has not; refreshes the own entry, and looks for others:
        often when alone, now and then when not, for the swarm may be in two parts. Until
        cancelled. Nobody waits for it: of the peers that are known some may be gone."""
        loop = asyncio.get_running_loop()
        published, looked = Since(), Since(loop.time())
        if self._node is None:
            self._initial = list(initial_peers)
            self._stale = True
        try:
            while True:
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        await self._renew_node()
                        if published.is_older(loop.time(), REFRESH_S) and await self.publish():
                            published.begin(loop.time())
                            await self.publish_for_others()
                        if self._is_alone() or looked.is_older(loop.time(), REFRESH_S):
                            looked.begin(loop.time())
                            await self.find_all()
                except Exception as e:  # hivemind has many
                    log.debug("the directory does not answer: %s", e)
                await asyncio.sleep(ANSWER_S * self._rng.uniform(0.5, 1.0))
        finally:
            await self.close()

    def _is_apart(self) -> bool:
        """The node knows none of those that the view has: it was joined through peers without a
        directory, say. Seen once in `REFRESH_S` at most."""
        now, own = asyncio.get_running_loop().time(), self._gossip.own.peer_id
        others = [r for r in self._gossip.view.live(now) if r.publishes and r.peer_id != own]
        if not others or not self._rejoined.is_older(now, REFRESH_S):
            return False
        return not self._node.protocol.routing_table.uid_to_peer_id

    def _is_full(self) -> bool:
        """The node has tables of too many that are gone. Seen once in `REFRESH_S` at most."""
        if not self._rejoined.is_older(asyncio.get_running_loop().time(), REFRESH_S):
            return False
        table = self._node.protocol.routing_table
        asked = sum(len(bucket.nodes_requested_for_ping) for bucket in table.buckets)
        most = max(len(table.uid_to_peer_id), len(self._node.blacklist.ban_counter), asked)
        return most > len(self._gossip.view) + MAX_GONE

    async def _renew_node(self) -> None:
        if self._node is not None and not self._stale:
            self._stale = self._is_apart() or self._is_full()
        if self._stale:
            self._stale = False
            self._rejoined.begin(asyncio.get_running_loop().time())
            # Those first that are in the directory themselves.
            records = sorted(self._gossip.view.records(), key=lambda r: not r.publishes)
            told = {
                record.peer_id: record.addresses
                for record in records[:MAX_FOUND]
                if record.peer_id != self._gossip.own.peer_id
            }
            known = of_all(told, self._gossip.transport.addresses(), is_told=True)
            try:
                await self.close()
                await self.start(known or self._initial)
            except BaseException:
                self._stale = True  # the daemon may not be there yet
                raise

    def _is_alone(self) -> bool:
        now = asyncio.get_running_loop().time()
        return len(self._gossip.view.live(now)) <= 1

    async def publish(self) -> bool:
        """Stores the own signed record under its stage; False while it has none."""
        return all([await self._publish(gossip) for gossip in list(self._published)])

    async def _publish(self, gossip: Gossip) -> bool:
        from hivemind.utils import get_dht_time

        own = gossip.own
        if own.stage == OBSERVER_STAGE or own.state == LEFT:
            return False
        if not own.publishes:
            gossip.update(publishes=True)
        envelope = gossip.own_record.seal()
        return bool(
            await self._node.store(
                stage_key(own.run_id, own.stage),
                subkey=own.peer_id,
                value=pack(envelope),
                expiration_time=Deadline.after(get_dht_time(), EXPIRY_S).at,
            )
        )

    async def publish_for_others(self) -> int:
        """Stores the records of those for whom this peer does so; returns how many there are."""
        from hivemind.utils import get_dht_time

        gossip, now = self._gossip, asyncio.get_running_loop().time()
        records = published_for(gossip.own.peer_id, gossip.view.counted(now))
        kept = {r.peer_id: gossip.records.envelopes([r.peer_id]) for r in records}
        records = [r for r in records if kept[r.peer_id]]
        if records:
            await self._node.store_many(
                [stage_key(r.run_id, r.stage) for r in records],
                [pack(kept[r.peer_id][0]) for r in records],
                Deadline.after(get_dht_time(), EXPIRY_S).at,
                subkeys=[r.peer_id for r in records],
            )
        return len(records)

    async def find(self, stage_index: int) -> int:
        """Takes the records of a stage's peers into the view; returns how many were news."""
        key = stage_key(self._gossip.own.run_id, stage_index)
        try:
            found = await self._node.get(key, latest=True)
        except Exception as e:  # anybody may have stored there what hivemind cannot read
            log.debug("stage %d of the directory cannot be read: %s", stage_index, e)
            return 0
        if found is None or not isinstance(found.value, dict):
            return 0
        news = 0
        for _, entry in sorted(found.value.items(), key=lambda item: str(item[0]))[:MAX_FOUND]:
            try:
                envelope = unpack(getattr(entry, "value", None), SignedRecord)
                # One by one: each has been stored by somebody else.
                news += await self._gossip.records.take_all("", [envelope], is_asked=True)
            except SwarmnetError as e:
                log.debug("an entry of the directory was dropped: %s", e)
        return news

    async def find_all(self) -> int:
        """`find` for every stage."""
        return sum([await self.find(k) for k in range(self._num_stages)])

    async def close(self) -> None:
        """Stops the DHT node; the daemon stays."""
        if self._node is not None:
            node, self._node = self._node, None
            await node.shutdown()
