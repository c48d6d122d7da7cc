"""What a replica takes of late contributions, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarmnet.protocol.membership.records import ACTIVE, LEAVING
from swarmnet.protocol.sync_modes import LOCAL, SyncPlan
from swarmnet.protocol.update.late_tokens import Late
from swarmnet.protocol.update.robust import MEAN, MEDIAN_CLIP
from swarmnet.simulation.device import InlineWorker
from swarmnet.swarm.update.exchange.late import LateContributions
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.optimizer.outer import OuterNesterov
from swarmnet.wire import Array

EXCHANGE, NEXT, AFTER, LAST = 9, 19, 29, 99


@dataclass
class Books:
    """100 tokens were counted for the exchange, and 60 are in it."""

    late: dict[str, Late] = field(default_factory=dict)

    def brought(self, exchange: int, shard: int, contributor: str) -> Late:
        return self.late.get(contributor, ())

    def brings(self, exchange: int, shard: int, contributor: str, late: Late) -> None:
        self.late[contributor] = late

    def counted_behind(self, exchange: int, shard: int) -> int:
        return 100

    def tokens_behind(self, exchange: int, shard: int) -> int:
        return 60


def array(value: float) -> Array:
    return from_tensor(torch.full((4,), value))


class Replica:
    """It has made the result of the exchange with its own contribution and that of b."""

    def __init__(self, rule: str = MEAN) -> None:
        self.totals: Counter[str] = Counter()
        self.own = SimpleNamespace(peer_id="own", state=ACTIVE, is_moving=False, strikes={})
        gossip: Any = SimpleNamespace(
            own=self.own,
            add_total=lambda name: self.totals.update([name]),
            amend=lambda **values: None,
        )
        replica: Any = SimpleNamespace(
            plan=SyncPlan(LOCAL, 100, local_steps=10),
            worker=InlineWorker(),
            optimizer=OuterNesterov([4], 0.7, 0.9),
        )
        self.books: Any = Books()
        self.late = LateContributions(gossip, replica, self.books, rule)

    async def decides(self) -> None:
        await self.late.contribution(EXCHANGE, 0, 20, array(20.0))
        self.late.decided(EXCHANGE, 0, frozenset({"own", "b"}))

    async def takes(self, sender: str, num_tokens: int, value: float) -> bool:
        return await self.late.take(EXCHANGE, 0, sender, num_tokens, array(value))

    async def given(self, exchange: int = NEXT) -> tuple[int, list[float]]:
        tokens, gradient = await self.late.contribution(exchange, 0, 10, array(10.0))
        assert gradient is not None
        return tokens, to_tensor(gradient).tolist()


def test_what_is_taken_is_in_the_next_contribution_once() -> None:
    async def scenario() -> None:
        one = Replica()
        await one.decides()
        assert not await one.takes("b", 20, 20.0), "it is in the result"
        assert not await one.late.take(EXCHANGE - 1, 0, "c", 20, array(1.0)), "another exchange"
        assert await one.takes("c", 20, 3.0)
        assert await one.takes("c", 20, 3.0), "said again"
        assert await one.takes("d", 5, 4.0)
        assert one.late.has_any
        assert await one.given() == (35, [17.0] * 4)
        assert one.books.late["own"] == (25,)
        assert not one.late.has_any
        assert await one.takes("c", 20, 3.0), "it counts all the same"
        assert await one.given(AFTER) == (10, [10.0] * 4)
        assert one.books.late["own"] == ()

    asyncio.run(scenario())


def test_an_upload_that_is_whole_after_the_next_exchange_is_in_the_one_after() -> None:
    async def scenario() -> None:
        one = Replica()
        await one.decides()
        assert await one.takes("c", 20, 3.0)
        assert await one.given() == (30, [13.0] * 4)
        one.late.decided(NEXT, 0, frozenset({"own", "b", "c"}))
        assert await one.takes("d", 5, 4.0), "of the exchange before"
        assert await one.late.take(NEXT, 0, "e", 7, array(2.0))
        assert await one.takes("d", 5, 4.0), "said again"
        assert await one.given(AFTER) == (22, [16.0] * 4)
        assert one.books.late["own"] == (7, 5)
        await one.given(AFTER + 10)
        assert not await one.takes("e", 5, 4.0), "three exchanges have gone by"

    asyncio.run(scenario())


def test_what_can_be_in_no_exchange_any_more_does_not_count() -> None:
    async def scenario() -> None:
        one = Replica()
        await one.late.contribution(LAST - 10, 0, 20, array(20.0))
        one.late.decided(LAST - 10, 0, frozenset({"own"}))
        assert await one.late.take(LAST - 10, 0, "c", 20, array(3.0))
        assert await one.given(LAST) == (30, [13.0] * 4)
        assert not await one.late.take(LAST - 10, 0, "d", 20, array(3.0))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("rule", "num_tokens", "value", "counts"),
    [
        (MEAN, 20, float("nan"), False),
        (MEAN, 20, 1e3, True),
        (MEDIAN_CLIP, 20, 30.0, True),
        (MEDIAN_CLIP, 20, 1e3, False),
        (MEDIAN_CLIP, 65, 65.0, True),
        (MEDIAN_CLIP, 66, 66.0, False),
    ],
    ids=["not finite", "large", "alike", "too large", "as many", "more than were counted"],
)
def test_a_replica_vouches_for_what_it_takes(
    rule: str, num_tokens: int, value: float, counts: bool
) -> None:
    """A token of its own contribution has a norm of 2."""

    async def scenario() -> None:
        one = Replica(rule)
        await one.decides()
        assert await one.takes("c", num_tokens, value) == counts
        assert one.totals["contributions_dropped"] == (not counts)
        tokens, _ = await one.given()
        assert tokens == 10 + num_tokens * counts

    asyncio.run(scenario())


def test_what_was_late_twice_is_given_up_and_who_leaves_takes_nothing() -> None:
    async def scenario() -> None:
        one = Replica()
        await one.decides()
        one.books.late["c"] = (5,)
        assert not await one.takes("c", 20, 3.0)
        one.own.state = LEAVING
        assert not await one.takes("d", 20, 3.0)
        one.own.state = ACTIVE
        assert await one.takes("d", 20, 3.0)
        assert await one.given(NEXT + 30) == (10, [10.0] * 4), "it was in no exchange for too long"

    asyncio.run(scenario())
