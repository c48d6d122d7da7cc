"""The ports of one peer, forwarded by its router as long as the peer runs."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from swarmnet.printable import printable
from swarmnet.transport.mapping.router import Opened, Router, RouterError

log = logging.getLogger("swarmnet.net")

LOOK_EVERY_S = 600.0
"""Between two looks for a router, while none does it: this machine may have moved."""
CLOSE_S = 5.0
"""For the router to close all of them, at the end."""


class PortMapping:
    """Asks the router again and again, and tells where others find the ports."""

    def __init__(
        self,
        ports: Sequence[int],
        find: Callable[[], AsyncIterator[Router]],
        tell: Callable[[Sequence[Opened]], None],
    ) -> None:
        """`find()`: the routers of this network, the best way to ask first. `tell(opened)`: after
        each change; ports at an address that is not public lead nobody here, and are left out."""
        self._ports = ports
        self._find = find
        self._tell = tell
        self._router: Router | None = None
        self._opened: list[Opened] = []
        self._told: list[Opened] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """From now on, until `close`."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Closes what was opened. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._close_all()
        except TimeoutError:
            log.info("the router does not say that it has closed the ports")

    async def _run(self) -> None:
        while True:
            wait_s = await self._renew()
            await asyncio.sleep(wait_s)

    async def _renew(self) -> float:
        """Opens the ports, or asks for them anew; in so many seconds it is time again."""
        router, lease_s = self._router, LOOK_EVERY_S
        if router is not None:
            lease_s = await self._open_all(router)
        if not self._opened:
            async for router in self._find():
                lease_s = await self._open_all(router)
                if self._opened:
                    break
        useful = [opened for opened in self._opened if _is_public(opened.host)]
        if [(o.port, o.host, o.outside) for o in useful] != [
            (o.port, o.host, o.outside) for o in self._told
        ]:
            self._told = useful
            self._tell(useful)
        return lease_s

    async def _open_all(self, router: Router) -> float:
        """All ports or none. The time until they are to be asked for again."""
        self._router = router
        before, self._opened = self._opened, []
        try:
            for port in self._ports:
                self._opened.append(await router.open(port))
        except RouterError as e:
            log.info("%s: the router opens no ports: %s", router.language, printable(str(e)))
            self._opened += [o for o in before if o.port not in {n.port for n in self._opened}]
            await self._close_all()
            self._router = None
            return LOOK_EVERY_S
        if not before:
            self._say(router)
        return min(opened.lease_s for opened in self._opened) / 2

    def _say(self, router: Router) -> None:
        host = self._opened[0].host
        ports = " and ".join(
            f"{o.port}" + (f" (outside {o.outside})" if o.outside != o.port else "")
            for o in self._opened
        )
        if _is_public(host):
            log.warning(
                "%s: the router forwards TCP ports %s to this machine, at %s; --no-port-map "
                "leaves it alone",
                router.language,
                ports,
                host,
            )
        else:
            log.warning(
                "%s: the router's own address %s is not public (a provider's NAT, or a second "
                "router): its ports lead nobody here",
                router.language,
                host,
            )

    async def _close_all(self) -> None:
        router, opened, self._opened = self._router, self._opened, []
        for one in opened:
            assert router is not None
            try:
                await router.close(one)
            except RouterError as e:
                log.info("the router keeps port %s open: %s", one.outside, printable(str(e)))


def _is_public(host: str) -> bool:
    return ipaddress.ip_address(host).is_global
