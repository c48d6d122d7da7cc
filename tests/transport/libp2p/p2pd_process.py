"""A peer on hivemind's daemon in a process of its own: echoes calls until its input ends.

python -m tests.transport.libp2p.p2pd_process IDENTITY_NUMBER RUNTIME_BASE

Prints one line: its address, the daemon's process id, the folder of its sockets.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import uvloop

from swarmnet.transport.base import Request
from swarmnet.transport.channel import ChannelTransport
from swarmnet.transport.libp2p.p2pd import P2pdCarrier
from swarmnet.transport.libp2p.runtime_dir import RUNTIME_PREFIX
from swarmnet.wire import Message
from tests.transport.streams import identity


async def echo(request: Request) -> Message:
    return request.message


def runtime_dirs(base: Path) -> list[Path]:
    """Those of this process."""
    return list(base.glob(f"{RUNTIME_PREFIX}{os.getpid()}-*"))


async def main(number: int, base: Path) -> None:
    carrier = P2pdCarrier(identity(number), runtime_base=base)
    transport = ChannelTransport(carrier)
    transport.handle("echo", echo)
    await transport.start()
    (folder,) = runtime_dirs(base)
    print(transport.addresses()[0], carrier.daemon_pid, folder, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), Path(sys.argv[2])))
