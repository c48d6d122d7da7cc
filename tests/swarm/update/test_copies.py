"""A backup that made the primary's step, bit for bit, is not given its result; another one is."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.spec import RunSpec
from swarmnet.swarm.update.exchange.books import Books
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.wire import Array
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

FIRST, LAST = 3, 6
"""Rounds that are measured: after every owner has its state."""


def spec_of(folder: Path, mode: str, codec: str) -> RunSpec:
    return tiny_spec(folder, num_stages=1, rounds=9, sync={"mode": mode, "codec": codec})


def sent_bytes(swarm: Swarm) -> int:
    peers = [m.peer for m in swarm.members.values()]
    return sum(sum(p.transport.traffic.sent_bytes.values()) for p in peers)


def in_the_last_bit(after: Array) -> Array:
    """What a machine makes of the step whose arithmetic differs a little."""
    values = to_tensor(after).clone()
    raw = values.view(torch.int32) if values.dtype == torch.float32 else values
    raw[-1] ^= 1
    return from_tensor(values)


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("mode", ["zero", "delayed"])
def test_who_makes_other_bits_gets_the_result(tmp_path: Path, mode: str, codec: str) -> None:
    found: dict[bool, int] = {}

    async def scenario(swarm: Swarm, is_unlike: bool) -> None:
        def build_unlike(stage_index: int) -> tuple[Any, Any]:
            stage, optimizer = swarm.build(stage_index)
            step = optimizer.step

            def unlike(j: int, present: Array, *rest: Any) -> tuple[Array, Array]:
                made = in_the_last_bit(step(j, present, *rest)[0])
                return made, optimizer.codec.applied(j, present, made)

            optimizer.step = unlike
            return stage, optimizer

        swarm.start("peer-0")
        swarm.start("peer-1", build=build_unlike if is_unlike else None)
        await swarm.until_round(FIRST)
        before = sent_bytes(swarm)
        await swarm.until_round(LAST)
        found[is_unlike] = (sent_bytes(swarm) - before) // (LAST - FIRST)
        await swarm.until_round(9)
        swarm.parameters()  # asserts that replicas are the same

    for is_unlike in (False, True):
        in_virtual_time(partial(scenario, is_unlike=is_unlike), spec_of(tmp_path, mode, codec))
    print(f"{mode}, {codec}: {found[False]:,} bytes a round, {found[True]:,} of unlike machines")
    assert found[True] > 1.2 * found[False]


def test_a_copy_that_there_is_not_costs_a_second_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a backup has given its copy up, or a primary lies."""
    takes_copy, told = Books.takes_copy, set[tuple[int, int, str]]()

    def lying(self: Books, exchange: int, shard: int, remote: str, digest: bytes) -> bool:
        key = (exchange, shard, remote)
        is_first = key not in told
        told.add(key)
        return is_first or takes_copy(self, exchange, shard, remote, digest)

    monkeypatch.setattr(Books, "takes_copy", lying)

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):  # two owners a shard
            swarm.start(f"peer-{i}")
        await swarm.until_round(6)
        swarm.parameters()

    in_virtual_time(scenario, spec_of(tmp_path, "zero", "int8"))
    assert len(told) > 10


def test_the_same_copy_is_taken_once() -> None:
    books = Books(None, None, None, None)  # type: ignore[arg-type]
    books.copied(3, 0, "b", b"digest")
    assert not books.takes_copy(3, 1, "b", b"digest")
    assert not books.takes_copy(3, 0, "c", b"digest")
    assert books.takes_copy(3, 0, "b", b"digest")
    assert not books.takes_copy(3, 0, "b", b"digest")
    books.copied(3, 0, "b", b"digest")
    assert not books.takes_copy(3, 0, "b", b"other")
    books.copied(3, 0, "b", b"")
    assert not books.takes_copy(3, 0, "b", b"")
    books.copied(3, 0, "b", b"digest")
    books.summed(3, 0, frozenset())  # again, by a higher ballot
    assert not books.takes_copy(3, 0, "b", b"digest")
