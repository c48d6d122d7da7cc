"""Separate processes over libp2p train one model, and it is the model of a plain loop."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from swarmnet.plurals import counted
from swarmnet.runtime.joining.starting import start_run
from swarmnet.swarm.recovery.checkpointing import Disk
from tests.processes.running import (
    RUN_LIMIT_S,
    Command,
    Machine,
    children_of,
    counted_by,
    parameters_of,
    processes_of,
    sockets_in,
    tiny_run,
)
from tests.swarm.harness import relative_difference, replay

pytestmark = pytest.mark.processes
ROUNDS, GLOBAL_BATCH = 20, 32
SLOW = ("--max-device-share", "20%")
"""Rounds last long enough for all that happens meanwhile."""


def test_processes_make_the_updates_of_one_process(running: Machine) -> None:
    """On two carriers."""
    path = tiny_run(running.folder, rounds=ROUNDS)
    spec = start_run(path).spec
    # With the first peer, one replica of each stage on each transport.
    peers = running.start_swarm(
        path,
        [
            ("--transport", "p2pd", "--stage", "1"),
            ("--transport", "py-libp2p", "--stage", "0"),
            ("--transport", "py-libp2p", "--stage", "1"),
        ],
        together=True,
    )
    running.until_round(peers[0], ROUNDS)
    running.until(lambda: _is_all_on_record(peers, spec.pipeline.microbatch))

    model = asyncio.run(parameters_of(spec, [peer.address for peer in peers]))
    trainer = replay(spec, counted_by(peers), ROUNDS)
    kinds = ("samples_lost", "retracted", "diverged", "shard_reset")
    told = [event for peer in peers for kind in kinds for event in peer.events(kind)]
    lost = [event for event in told if event["event"] == "samples_lost"]
    difference = relative_difference(model, trainer.state_dict())
    assert difference < 1e-4, "\n".join([*map(str, told), running.describe()])
    assert not lost

    seen = _status(running, peers[-1])
    assert seen["run_id"] == spec.run_id
    assert (seen["round"], len(seen["peers"])) == (ROUNDS, 4)
    assert [stage["num_replicas"] for stage in seen["stages"]] == [2, 2]
    assert seen["held_out_round"] == ROUNDS
    served = {p["peer_id"]: p["samples_per_s"] for p in seen["peers"]}
    assert all(served[peer.peer_id] > 0 for peer in peers), "a replica got no microbatch"

    for peer in peers:
        running.interrupt(peer)
    assert [running.wait(peer) for peer in peers] == [0, 0, 0, 0], running.describe()
    _assert_nothing_left(running)


def test_a_run_survives_its_first_peer(running: Machine) -> None:
    """The bootstrap peer is killed; a newcomer joins through another one and a third one leaves."""
    rounds = 120
    path = tiny_run(running.folder, rounds=rounds)
    stages = [("--stage", stage) for stage in "101"]
    peers = running.start_swarm(path, stages, everywhere=SLOW, together=True)
    victim, witness = peers[0], peers[1]
    running.until_all_are_in(peers, 5)
    daemons = children_of(victim.pid)
    assert daemons, "the peer has no daemon"
    running.kill(victim)
    running.until(lambda: not any(pid in processes_of(running.folder) for pid in daemons))

    newcomer = running.start_peer(
        "late", "--join", witness.address, "--data", str(running.folder / "text.txt"), *SLOW
    )
    running.until_round(newcomer, 3)
    stale = [p for p in sockets_in(running.folder) if f"swarmnet-{victim.pid}-" in str(p)]
    assert not stale, "the runtime folder of a killed peer was not cleaned up"
    running.interrupt(peers[3])
    assert running.wait(peers[3]) == 0, peers[3].describe()
    assert "left before" not in " ".join(peers[3].errors())

    running.until_round(witness, rounds)
    alive = [witness, peers[2], newcomer]
    model = asyncio.run(parameters_of(start_run(path).spec, [peer.address for peer in alive]))
    assert all(bool(p.isfinite().all()) for p in model.values())
    losses = [event["loss"] for event in witness.events("round")]
    assert losses[-1] < 0.6 * losses[0]
    lost = {event["peer_id"]: event["clean"] for event in witness.events("peer_lost")}
    assert lost[victim.peer_id] is False
    assert lost[peers[3].peer_id] is True
    assert not witness.events("shard_reset"), running.describe()


def test_ctrl_c_ends_local_with_all_its_peers(running: Machine) -> None:
    path = tiny_run(running.folder, rounds=100_000)
    local = running.start(
        "local",
        "local",
        "--peers",
        "2",
        "--spec",
        str(path),
        "--plain",
        "--metrics",
        str(running.folder / "local.jsonl"),
    )
    running.until(lambda: local.events("round"))
    running.interrupt(local)
    assert running.wait(local) == 1
    assert local.errors() == []
    assert "samples lost" in local.output()  # the summary of what there is
    _assert_nothing_left(running)


def test_a_local_run_that_is_kept_goes_on(running: Machine) -> None:
    path = tiny_run(running.folder, rounds=100_000)
    words = ["local", "--peers", "2", "--spec", str(path), "--plain"]
    words += ["--state-dir", str(running.folder / "kept")]
    words += ["--metrics", str(running.folder / "local.jsonl")]
    local = running.start("local", *words)
    running.until(lambda: len(local.events("round")) >= 15)
    running.interrupt(local)
    assert running.wait(local) == 1
    assert "the same command goes on with it" in local.output()
    before = local.events("round")
    local = running.start("local", *words)
    running.until(lambda: len(local.events("round")) >= len(before) + 5)
    after = local.events("round")[len(before) :]
    newest = before[-1]["round"]
    # Who leaves in the middle of an exchange, and cannot wait for its end, goes on from the
    # checkpoint before.
    assert newest - Disk.every - 1 <= after[0]["round"] <= newest + 15, (newest, after[0])
    assert after[0]["loss"] < (before[0]["loss"] + before[-1]["loss"]) / 2
    running.interrupt(local)
    assert running.wait(local) == 1
    _assert_nothing_left(running)


def test_local_with_chaos_says_what_it_cost(running: Machine) -> None:
    path = tiny_run(running.folder, rounds=100)
    local = running.start(
        "local",
        "local",
        "--peers",
        "4",
        "--spec",
        str(path),
        "--plain",
        "--chaos",
        "kill=10/min",
        "--metrics",
        str(running.folder / "local.jsonl"),
    )
    assert running.wait(local, RUN_LIMIT_S) == 0
    said = local.output()
    killed = said.count("is killed (SIGKILL)")
    assert killed > 0
    assert f"chaos: {counted(killed, 'peer')} killed, 0 stopped for a while" in said
    assert "samples lost" in said
    losses = [event["loss"] for event in local.events("round")]
    assert losses[-1] < 0.9 * losses[0]
    # Sockets of those that were killed stay until the next peer starts.
    running.until(lambda: not processes_of(running.folder), 30)


def test_the_last_words_of_a_peer_of_local_have_not_been_read_before(running: Machine) -> None:
    path = tiny_run(running.folder, num_stages=1, rounds=100_000)
    local = running.start("local", "local", "--peers", "2", "--spec", str(path), "--plain")
    running.until(lambda: "replicas by stage: 2" in local.output())
    peers = [pid for pid, line in processes_of(running.folder).items() if "--ready-file" in line]
    os.kill(max(peers), signal.SIGKILL)
    running.until(lambda: "was ended by SIGKILL; the run goes on" in local.output())
    at_death = len(local.output())
    running.until(lambda: "round " in local.output()[at_death:])
    last_words = [x for x in local.output().splitlines() if re.match(r"  peer-\d: ", x)]
    assert "fp32 on cpu" in " ".join(last_words), local.output()
    of_the_run = re.compile(r"  peer-\d: (round|replicas|peer|held-out|swarmnet peer)\b")
    assert not [line for line in last_words if of_the_run.match(line)]
    running.interrupt(local)
    assert running.wait(local) == 1


def test_local_that_is_killed_leaves_no_process(running: Machine) -> None:
    path = tiny_run(running.folder, rounds=100_000)
    local = running.start("local", "local", "--peers", "2", "--spec", str(path), "--plain")
    running.until(lambda: len(children_of(local.pid)) >= 2)  # later its own daemon is one too
    running.kill(local)
    running.until(lambda: not processes_of(running.folder), 30)


def test_ctrl_c_on_status_and_on_a_peer_that_is_alone(running: Machine) -> None:
    path = tiny_run(running.folder, num_stages=1, rounds=100_000)
    peer = running.start_peer("peer-0", "--spec", str(path))
    running.until_round(peer, 1)
    status = running.start("status", "status", peer.address)
    running.until(lambda: any(_is_daemon(pid) for pid in children_of(status.pid)))
    running.interrupt(status)
    assert running.wait(status) == 1
    assert status.errors() == []
    running.interrupt(peer)
    assert running.wait(peer) == 0
    chosen, leaving = peer.errors()
    assert "activations" in chosen  # what it has chosen for its stage, in one line
    assert "handing over and leaving" in leaving
    _assert_nothing_left(running)


def _is_all_on_record(peers: Sequence[Command], microbatch: int) -> bool:
    """The feeders' lists have a whole global batch of every round."""
    counted = counted_by(peers)
    return all(len(counted.get(r, ())) * microbatch >= GLOBAL_BATCH for r in range(ROUNDS))


def _status(running: Machine, peer: Command) -> dict[str, object]:
    status = running.start("status", "status", peer.address, "--json")
    assert running.wait(status) == 0, status.describe()
    assert status.errors() == []
    seen: dict[str, object] = json.loads(status.output())
    return seen


def _is_daemon(pid: int) -> bool:
    try:
        return b"p2pd" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:
        return False


def _assert_nothing_left(running: Machine) -> None:
    left = processes_of(running.folder)
    assert not left, f"left running: {left}"
    assert sockets_in(running.folder) == []
