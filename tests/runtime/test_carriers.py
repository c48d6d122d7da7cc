"""Which carrier a machine uses where nobody says."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import platform
import sys

import pytest

from swarmnet.errors import TransportError
from swarmnet.identity import Identity
from swarmnet.runtime.carriers import carrier_of
from swarmnet.runtime.net import open_net
from swarmnet.runtime.options import TransportName

MACHINES = [
    ("Linux", "x86_64", "p2pd"),
    ("Linux", "aarch64", "py-libp2p"),
    ("Darwin", "arm64", "py-libp2p"),
    ("Darwin", "x86_64", "py-libp2p"),
    ("Windows", "AMD64", "py-libp2p"),
]


@pytest.mark.parametrize(("system", "machine", "carrier"), MACHINES)
def test_the_daemon_is_taken_where_it_is_built_for(
    system: str, machine: str, carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert carrier_of("auto") == carrier
    assert carrier_of("p2pd") == "p2pd", "who asks for it gets it, or its error"


def test_without_hivemind_py_libp2p_carries_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "hivemind" else find(name)
    )

    async def scenario() -> None:
        net = await open_net("auto", Identity.generate(), host="127.0.0.1", port=0, announce=())
        assert net.p2p is None, "there is no daemon, and no DHT of its own"
        await net.transport.close()

    with caplog.at_level(logging.WARNING, "swarmnet.net"):
        asyncio.run(scenario())
    (line,) = [r.getMessage() for r in caplog.records if r.name == "swarmnet.net"]
    assert "py-libp2p" in line


@pytest.mark.parametrize("name", ["auto", "p2pd"])
def test_a_daemon_that_does_not_start_is_an_error_for_those_alone_that_asked_for_it(
    name: TransportName, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is for this machine, and a library that hivemind imports is not there."""
    monkeypatch.setitem(sys.modules, "hivemind.p2p", None)

    async def scenario() -> None:
        net = await open_net(name, Identity.generate(), host="127.0.0.1", port=0, announce=())
        assert net.p2p is None
        await net.transport.close()

    with caplog.at_level(logging.WARNING, "swarmnet.net"):
        if name == "p2pd":
            with pytest.raises(TransportError, match="hivemind cannot be imported"):
                asyncio.run(scenario())
            return
        asyncio.run(scenario())
    (line,) = [r.getMessage() for r in caplog.records if r.name == "swarmnet.net"]
    assert "hivemind cannot be imported" in line
    assert "py-libp2p carries" in line
