"""Which of the two carriers of libp2p this machine uses."""

from __future__ import annotations

import importlib.util
import platform
from typing import Literal

import swarmnet.system as system
from swarmnet.runtime.options import TransportName

P2PD_PLATFORM = ("Linux", "x86_64")
"""For which hivemind's package has its daemon."""


def runs_p2pd() -> bool:
    """hivemind's daemon is installed, and built for this machine."""
    is_built = (platform.system(), platform.machine()) == P2PD_PLATFORM and not system.PORTABLE
    return is_built and importlib.util.find_spec("hivemind") is not None


def here() -> str:
    """This platform, as people call it."""
    return f"{platform.system()} {platform.machine()}"


def carrier_of(name: TransportName) -> Literal["p2pd", "py-libp2p"]:
    """`auto`: the daemon where it runs, else py-libp2p."""
    if name == "auto":
        return "p2pd" if runs_p2pd() else "py-libp2p"
    return name
