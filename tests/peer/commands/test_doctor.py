"""`swarmnet doctor` on machines that have something wrong with them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import platform
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import swarmnet.training.accelerators as accelerators
from peer.commands import doctor, doctor_report
from peer.commands.doctor import BAD, GOOD, SKIPPED, WARNING
from peer.commands.doctor_nat import check_nat, is_on
from swarmnet.errors import Busy, Unreachable, UserError
from swarmnet.identity import Identity
from swarmnet.methods.contact import BandwidthRequest, DialBackReply, DialBackRequest
from swarmnet.methods.method import PROBES
from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.membership.view import View
from swarmnet.runtime.options import default_spec_path
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.simulation.population import OpenSigner
from swarmnet.spec import load_spec
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.membership.probes import NOT_REACHED, Probes
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import Message, convert

SPEC = load_spec(default_spec_path())


def only(findings: list[doctor.Finding], check: str) -> doctor.Finding:
    [finding] = [f for f in findings if f.check == check]
    if finding.level in (WARNING, BAD):
        assert finding.mend, "what is wrong is said with how to mend it"
    return finding


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert only(doctor.check_python(), "Python").level == BAD


def test_a_platform_without_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert "py-libp2p" in only(doctor.check_python(), "platform").mend


class Installed:
    """A `swarmnet` that pip has put into a folder of its own."""

    def __init__(self, folder: Path, entry: str = "") -> None:
        self.first = folder / "swarmnet" / "__init__.py"
        self.first.parent.mkdir()
        self.first.write_text("from swarmnet.swarmnet import SwarmNet\n")
        digest = hashlib.sha256(self.first.read_bytes()).digest()
        coded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        about = folder / "swarmnet-0.0.8.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: swarmnet\nVersion: 0.0.8\n")
        (about / "RECORD").write_text(f"swarmnet/__init__.py,sha256={coded},39\n")
        if entry:
            (about / "entry_points.txt").write_text(f"[console_scripts]\nswarmnet = {entry}\n")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where packages are looked for, and nothing else is."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_the_package_that_pypi_calls_swarmnet(elsewhere: Path) -> None:
    assert only(doctor.check_package(), "swarmnet").level == GOOD
    theirs = Installed(elsewhere)
    finding = only(doctor.check_package(), "swarmnet")
    assert finding.level == BAD
    assert "swarmnet 0.0.8, lies over this one" in finding.found
    assert finding.mend.startswith("pip uninstall swarmnet")
    theirs.first.write_text("# ours, installed after it\n")
    finding = only(doctor.check_package(), "swarmnet")
    assert finding.level == WARNING
    assert "beside" in finding.found


def test_this_package_under_the_name_that_it_had_is_nobody_elses(elsewhere: Path) -> None:
    Installed(elsewhere, "peer.cli:main")
    assert only(doctor.check_package(), "swarmnet").level == GOOD


@pytest.mark.parametrize(
    ("tool", "cuda", "level", "said"),
    [
        (None, None, SKIPPED, "CPU"),
        ("/usr/bin/nvidia-smi", None, WARNING, "this torch cannot use it"),
        ("/usr/bin/nvidia-smi", "13.0", WARNING, "driver"),
    ],
)
def test_a_gpu_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, tool: str | None, cuda: str | None, level: str, said: str
) -> None:
    import torch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: tool)
    finding = only(doctor.check_torch(), "GPU")
    assert finding.level == level
    assert said in finding.found


def test_a_full_disk_and_a_folder_of_somebody_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert only(doctor.check_disk(tmp_path), "disk").level == GOOD
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert only(doctor.check_disk(tmp_path), "disk").level == WARNING
    monkeypatch.setattr("os.access", lambda *_: False)
    assert only(doctor.check_disk(tmp_path), "disk").level == BAD


def test_a_run_that_is_too_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import psutil

    assert only(doctor.check_spec(SPEC, tmp_path), "the run").level == GOOD
    little: Any = SimpleNamespace(available=1 << 20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: little)
    assert only(doctor.check_spec(SPEC, tmp_path), "the run").level == BAD


def test_a_peer_with_this_device_and_precision(tmp_path: Path) -> None:
    """Memory and speed are the plan's, of the precision that is asked for."""
    found = {p: doctor.check_spec(SPEC, tmp_path, "cpu", p) for p in ("auto", "bf16")}
    assert "in fp32" in only(found["auto"], "the run").found
    assert "in bf16" in only(found["bf16"], "the run").found
    speed = only(found["bf16"], "speed")
    assert speed.level == GOOD
    assert "tokens/s at a stage" in speed.found
    assert float(speed.found.split()[1].replace(",", "")) > 0


def test_a_device_that_is_not_here(tmp_path: Path) -> None:
    missing = next(kind for kind in ("xpu", "mps", "cuda") if kind != accelerators.kind())
    with pytest.raises(UserError, match=f"--device {missing}: this machine has 0"):
        doctor.check_spec(SPEC, tmp_path, missing)


@pytest.mark.parametrize(
    ("address", "private"),
    [
        ("/ip4/192.168.1.7/tcp/1", True),
        ("/ip4/127.0.0.1/tcp/1", True),
        ("/ip6/fe80::1/tcp/1", True),
        ("/ip4/93.184.215.14/tcp/1", False),
        ("/dns4/example.org/tcp/1", False),
    ],
)
def test_which_addresses_are_private(address: str, private: bool) -> None:
    assert doctor.is_private(address) is private


class Helper:
    """A peer that answers, and somebody who asks."""

    def __init__(self) -> None:
        self.hub = MemoryHub()
        transport = self.hub.transport("helper")
        transport.set_run("run")
        own = Record("helper", "run", 1, 1, state=ACTIVE, stage=0)
        import random

        gossip = Gossip(transport, View("helper"), OpenSigner(), own, random.Random(0))
        self.probes = Probes(transport, gossip)
        self.asker = self.hub.transport("asker")
        self.listener = Identity(b"l" * 32).peer_id
        self.hub.transport(self.listener)

    async def ask(self, *addresses: str) -> DialBackReply:
        reply = await self.asker.call(
            "helper", "dial_back", Message(DialBackRequest(addresses)), timeout_s=60.0
        )
        return convert(reply.body, DialBackReply)


def test_a_peer_dials_back_and_says_why_it_could_not() -> None:
    async def main() -> None:
        helper = Helper()
        reached = f"/memory/p2p/{helper.listener}"
        answer = await helper.ask(reached, "/memory/p2p/nobody")
        assert answer.reasons[0] == ""
        assert answer.reasons[1]

    run_virtual(main())


def test_no_answer_tells_why_a_peer_is_not_reached() -> None:
    """Else whoever asks could tell an open port from a closed one."""

    async def main() -> None:
        helper = Helper()
        answer = await helper.ask("/memory/p2p/nobody", "garbage", "/memory/p2p/helper")
        assert answer.reasons == (NOT_REACHED,) * 3

    run_virtual(main())


def test_a_peer_helps_each_asker_a_few_times_only() -> None:
    async def main() -> None:
        helper = Helper()
        for _ in range(int(PROBES.burst)):
            await helper.asker.call(
                "helper", "bandwidth", Message(BandwidthRequest(1000)), timeout_s=5.0
            )
        with pytest.raises(Busy):
            await helper.ask("/memory/p2p/x")
        await asyncio.sleep(20.0)
        assert (await helper.ask("/memory/p2p/x")).reasons[0]

    run_virtual(main())


def test_the_report_of_a_machine_that_nobody_reaches() -> None:
    async def main() -> None:
        helper = Helper()
        own = ["/ip4/192.168.1.7/tcp/4001/p2p/x", "/ip4/10.0.0.7/tcp/4001/p2p/x"]
        found = await doctor.check_way_in(helper.asker, "helper", own)
        finding = only(found, "the way in")
        assert finding.level == WARNING
        assert "NAT" in finding.found
        assert "--announce" in finding.mend
        reached = [f"/memory/p2p/{helper.listener}"]
        found = await doctor.check_way_in(helper.asker, "helper", reached)
        assert only(found, "the way in").level == GOOD

    run_virtual(main())


def test_a_peer_of_this_machine_says_nothing_of_its_nat() -> None:
    """Neither where it reaches the asker nor where it does not is a router spoken of."""

    async def main() -> None:
        helper = Helper()
        for own in ([f"/memory/p2p/{helper.listener}"], ["/ip4/192.168.1.7/tcp/4001/p2p/x"]):
            found = await doctor.check_way_in(helper.asker, "helper", own, is_here=True)
            finding = only(found, "the way in")
            assert "on this machine" in finding.found
            assert "NAT" not in finding.found
            assert "forward" not in finding.mend
        here = {"192.168.1.7"}  # and this peer does not say whom it knows
        found = await check_nat(
            helper.asker, "helper", can_compare=True, own_hosts=here, is_here=True
        )
        assert [(f.check, f.level) for f in found] == [("other peers", SKIPPED), ("NAT", SKIPPED)]

    run_virtual(main())


@pytest.mark.parametrize(
    ("addresses", "is_here"),
    [
        (["/ip4/127.0.0.1/tcp/1/p2p/x"], True),
        (["/ip4/192.168.1.7/tcp/1/p2p/x", "/ip4/127.0.0.1/tcp/1/p2p/x"], True),
        (["/ip4/192.168.1.8/tcp/1/p2p/x", "/ip4/127.0.0.1/tcp/1/p2p/x"], False),
        (["/ip4/93.184.215.14/tcp/1/p2p/x"], False),
        ([], False),
    ],
)
def test_which_peers_are_on_this_machine(addresses: list[str], is_here: bool) -> None:
    record = Record("x", "run", 1, 1, addresses=tuple(addresses))
    assert is_on({"192.168.1.7", "127.0.0.1"}, record) is is_here


def test_a_clock_that_is_wrong() -> None:
    assert doctor.check_clock(2.0).level == GOOD
    assert doctor.check_clock(-300.0).level == WARNING


def test_a_peer_that_cannot_help_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        helper = Helper()
        helper.hub.kill("helper")
        with pytest.raises(Unreachable):
            await doctor.check_speed(helper.asker, "helper")

    run_virtual(main())


A_PEER = "12D3KooWFNNRPFdtKZVB6b9xkkLUzDPY5VzHveGSTjHfcwKuMyE9"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("no file /home/alice/run/x.so", "no file PATH"),
        ("C:\\Users\\alice\\x: no", "PATH: no"),
        ("~/models is full", "PATH is full"),
        ("192.168.1.7 port 4001: refused", "HOST port 4001: refused"),
        ("fe80::1:2:3 and 2001:db8::7:1", "HOST and HOST"),
        (f"/ip4/5.5.5.5/tcp/4/p2p/{A_PEER}", "PATH"),
        (f"peer {A_PEER} is gone", "peer PEER is gone"),
        ("Tower says that Alice\n is root", "MACHINE says that USER is root"),
        ("float16/bfloat16, 3.11.7, 12:30", "float16/bfloat16, 3.11.7, 12:30"),
    ],
)
def test_a_report_has_nothing_personal(
    monkeypatch: pytest.MonkeyPatch, said: str, told: str
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "tower")
    monkeypatch.setattr("getpass.getuser", lambda: "alice")
    assert doctor_report.impersonal(said) == told


def test_a_report_says_what_this_machine_is_and_what_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "tower")
    found = dict(asyncio.run(doctor_report.report()))
    assert found["swarmnet"] == doctor.__version__
    assert found["accelerators"] == "none"
    for what in ("cpu trains", "carrier p2pd", "carrier py-libp2p"):
        assert found[what].startswith("yes"), found
        assert "NO" not in found[what], found
    everything = " ".join(found.values())
    assert "PATH" not in everything
    for part in (str(Path.home()), str(Path.cwd()), "tower", "127.0.0.1", "/p2p/"):
        assert part not in everything


def test_a_report_says_what_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel in /home/alice/lib")

    monkeypatch.setattr("swarmnet.training.device_trial.try_device", fails)
    assert dict(doctor_report.devices())["cpu trains"].startswith("NO: RuntimeError: no kernel in")
    monkeypatch.setitem(sys.modules, "hivemind.p2p", None)
    said = asyncio.run(doctor_report.tried(doctor_report.carries, "p2pd"))
    assert said.startswith("NO: hivemind cannot be imported")
