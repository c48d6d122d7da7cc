"""A peer on py-libp2p in a process of its own: echoes every stream until its input ends.

python -m tests.transport.echo_process IDENTITY_NUMBER PORT
"""

from __future__ import annotations

import asyncio
import sys

from swarmnet.transport.libp2p.py_libp2p import PyLibp2pCarrier
from tests.transport.streams import Echo, identity


async def main(number: int, port: int) -> None:
    carrier = PyLibp2pCarrier(identity(number), port=port)
    await carrier.start(lambda stream: Echo(stream) and None)
    print(carrier.addresses()[0], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await carrier.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
