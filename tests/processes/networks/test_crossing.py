"""Two peers that dial each other at once; network namespaces, real daemons."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest

from swarmnet.identity import Identity
from swarmnet.transport.libp2p.p2pd import P2pdCarrier
from tests.processes.networks.inside import world
from tests.processes.networks.internet import Internet

pytestmark = pytest.mark.processes

ON_ITS_WAY_S = 0.3
"""In which the packets of a dial are sent; the kernel sends them again after a second."""
MET_WITHIN_S = 4.0
"""Less than the five seconds for which a daemon refuses an address that did not work."""


@contextmanager
def inside(space: str) -> Iterator[None]:
    """This thread, and the processes that it starts, are in a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    handles = [os.open(p, os.O_RDONLY) for p in (f"/run/netns/{space}", "/proc/self/ns/net")]
    there, home = handles
    try:
        assert not libc.setns(there, 0), os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert not libc.setns(home, 0), os.strerror(ctypes.get_errno())
    finally:
        for handle in handles:
            os.close(handle)


async def dial(carrier: P2pdCarrier, other: P2pdCarrier) -> None:
    stream = await carrier.open(other.peer_id)
    stream.transport.abort()


def test_two_that_dial_each_other_at_once_meet(tmp_path: Path) -> None:
    """As two newcomers do that hear of each other at one moment: the packets with which they begin
    cross on the way. Here those of the first are dropped until the second has sent its own, which
    find it waiting for an answer as if they had crossed."""

    async def meet(net: Internet, first: P2pdCarrier, second: P2pdCarrier) -> None:
        net.cut_one_way(1, 2)
        async with asyncio.TaskGroup() as dials, asyncio.timeout(MET_WITHIN_S):
            dials.create_task(dial(first, second))
            await asyncio.sleep(ON_ITS_WAY_S)
            dial_back = dials.create_task(dial(second, first))
            await asyncio.sleep(ON_ITS_WAY_S)
            net.heal_one_way(2)
            await dial_back

    async def scenario(net: Internet) -> None:
        carriers: list[P2pdCarrier] = []
        async with AsyncExitStack() as stack:
            for space in (net.public("one"), net.public("two")):
                carrier = P2pdCarrier(Identity.generate(), host="0.0.0.0", runtime_base=tmp_path)
                with inside(space):
                    await carrier.start(lambda stream: stream.transport.abort())
                stack.push_async_callback(carrier.close)
                carriers.append(carrier)
            for carrier, other in (carriers, carriers[::-1]):
                carrier.learn(other.peer_id, other.addresses())
            await meet(net, *carriers)

    with world() as (made, _):
        asyncio.run(scenario(made))
