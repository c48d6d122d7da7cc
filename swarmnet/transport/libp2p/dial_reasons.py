"""Why a peer was not reached, in one line: from what the daemon says of its dials."""

from __future__ import annotations

import re
from collections.abc import Sequence

from swarmnet.printable import printable

MAX_REASONS = 1024
"""Addresses of which the reason of the last failed dial is remembered."""
DIAL_FAILURE = re.compile(r"\* \[([^\]]+)\] ([^\n]*)")
"""How the daemon says what was wrong with each address of a peer."""
OTHER_PROTOCOL = "it does not speak this version of swarmnet's protocol"


class DialReasons:
    """Reasons by address. The daemon dials no address again for some seconds after it failed, and
    then says only that; the reason is from before."""

    def __init__(self) -> None:
        self._by_address: dict[str, str] = {}

    def explain(self, text: str, addresses: Sequence[str]) -> str:
        """One line: what is wrong with the address that was asked for. `text`: the daemon's;
        `addresses`: those of the peer, that which was asked for first."""
        for address, reason in DIAL_FAILURE.findall(text):
            if "dial backoff" not in reason:
                self._by_address.pop(address, None)
                if len(self._by_address) >= MAX_REASONS:
                    del self._by_address[next(iter(self._by_address))]
                self._by_address[address] = _reason(reason)
        for address in addresses:
            if f"[{address}]" in text and address in self._by_address:
                return self._by_address[address]
        return _reason(text)


def _reason(text: str) -> str:
    """One line that says which of the things that can be wrong it is."""
    for sign, reason in (
        ("peer id mismatch", "another peer answers there: the peer id in the address is wrong"),
        ("connection refused", "connection refused: nothing listens there"),
        ("protocols not supported", OTHER_PROTOCOL),
        ("protocol not supported", OTHER_PROTOCOL),
        ("no route to host", "no route to that host"),
        ("network is unreachable", "no route to that host"),
        ("no transport for protocol", "that kind of address cannot be dialled"),
        ("failed to negotiate", "what answers there is no libp2p peer"),
        ("no addresses", "no address of it is known"),
        ("failed to find any peer", "no address of it is known"),
        ("no good addresses", "no address of it can be dialled from here"),
        ("deadline exceeded", "no answer in time"),
        ("i/o timeout", "no answer in time"),
        ("dial to self", "that is this peer's own address"),
    ):
        if sign in text:
            return reason
    return printable(" ".join(text.split())[-200:])
