"""What `swarmnet doctor` says in networks that are no home's: a hotel's, a phone's, a VPN; network
namespaces."""

from __future__ import annotations

import pytest

from tests.processes.networks.inside import doctor, start, world
from tests.processes.running import SPARING, tiny_run

pytestmark = [pytest.mark.processes, pytest.mark.long]
WEB = (80, 443)
CARRIERS_NET, VPN_NET = "100.72.3", "100.101.7"
"""Both of the block that providers and VPNs share (100.64.0.0/10)."""


def test_doctor_says_that_the_network_is_captive_and_what_it_says_to_type_works() -> None:
    with world() as (net, running):
        one, hotel, home = net.public("one"), net.behind_nat("hotel"), net.behind_nat("home")
        net.captive(hotel, WEB)
        spec = tiny_run(running.folder, rounds=100_000)
        at = f"/ip4/{net.address_of(1)}/tcp"
        usual = ("--spec", str(spec), "--stage", "0", "--debug", *SPARING)
        first = start(running, one, "one", *usual, "--port", "4001")
        running.until_ready(first)
        # The same peer: from a home, and from a hotel.
        address = f"{at}/4001/p2p/{first.peer_id}"
        assert doctor(running, home, address)["the way out"]["level"] == "good"
        out = doctor(running, hotel, address, code=1)["the way out"]
        assert out["level"] == "bad"
        assert f"{net.address_of(1)} answers at port 443 and not at 4001" in out["found"]
        assert "the network here lets out a few ports only" in out["found"]
        assert "--port 443" in out["mend"]
        running.kill(first)
        (running.folder / "one.ready").unlink()
        # Nobody is there any more, at any port: that is no network's fault.
        gone = doctor(running, home, address, code=1)["the way out"]
        assert "nothing listens at port 4001" in gone["found"]
        # What was said to type.
        again = start(running, one, "one", *usual, "--port", "443")
        running.until_ready(again)
        address = f"{at}/443/p2p/{again.peer_id}"
        found = doctor(running, hotel, address)
        assert found["the way out"]["level"] == "good"
        assert "others reach it through relays" in found["who gets here"]["found"]
        data = ("--data", str(running.folder / "text.txt"))
        guest = start(running, hotel, "guest", "--join", address, "--stage", "1", *data, *SPARING)
        running.until_ready(guest)
        running.until(lambda: len(guest.events("round")) >= 5)


def test_doctor_tells_a_providers_nat_from_a_vpn() -> None:
    """By one address each of the same block: there the way out begins, and here it does not."""
    with world() as (net, running):
        one, laptop = net.public("one"), net.behind_nat("laptop")
        phone = net.behind_nat("phone", net=CARRIERS_NET)
        inside = net.cable((one, laptop), "tailscale0", VPN_NET)
        spec = tiny_run(running.folder, rounds=100_000)
        usual = ("--spec", str(spec), "--port", "4001", "--debug", *SPARING)
        first = start(running, one, "one", *usual)
        running.until_ready(first)
        end = f"/tcp/4001/p2p/{first.peer_id}"

        found = doctor(running, phone, f"/ip4/{net.address_of(1)}{end}")["who gets here"]
        assert found["level"] == "warning"
        assert f"{CARRIERS_NET}.2" in found["found"]
        assert "the provider shares" in found["found"]
        assert "IPv6" in found["mend"]

        found = doctor(running, laptop, f"/ip4/{inside[0]}{end}")["who gets here"]
        assert found["level"] == "good"
        assert f"peers of the VPN on tailscale0 reach this machine at {inside[1]}" in found["found"]

        # The same laptop, asked from outside of the VPN, is behind its router.
        found = doctor(running, laptop, f"/ip4/{net.address_of(1)}{end}")["who gets here"]
        assert found["level"] == "warning"
        assert "a router stands before this machine" in found["found"]
