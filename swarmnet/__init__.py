"""swarmnet: decentralized pipeline, data, tensor and ZeRO parallel training.

A peer in a program of one's own, as `swarmnet peer` runs it:

    import asyncio, pathlib, swarmnet

    options = swarmnet.PeerOptions(pathlib.Path("state"), join=("/ip4/...",))
    asyncio.run(swarmnet.run_peer(options))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swarmnet.version import __version__

if TYPE_CHECKING:
    from swarmnet.runtime.observer import Observer
    from swarmnet.runtime.options import PeerOptions
    from swarmnet.runtime.run import run_peer

__all__ = ["Observer", "PeerOptions", "__version__", "run_peer"]

_PLACES = {"Observer": "observer", "PeerOptions": "options", "run_peer": "run"}


def __getattr__(name: str) -> Any:
    """Imported when they are used: a version or a spec is to be had without torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"swarmnet.runtime.{_PLACES[name]}"), name)
