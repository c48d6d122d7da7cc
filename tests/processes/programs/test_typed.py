"""What the pages give to type beside a live run does what they say, as a process of its own. The
run is a closed one with adapters, as on most of these pages."""

from __future__ import annotations

import io
import re
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from peer.cli import run_command
from tests.docs.typed import Typed, typed, with_values
from tests.processes.running import SPARING, SWARMNET, Command, Machine, machine, tiny_run
from tests.training.test_families import folder_of

pytestmark = [pytest.mark.processes, pytest.mark.long]

ROOT = Path(__file__).parents[3]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
LAST = ("swarmnet stop ", "swarmnet export --state-dir ")
"""Commands of a run that ends, or has ended."""
BESIDE = sorted(
    {each.line: each for each in typed() if each.runs_beside}.values(),
    key=lambda each: next((i for i, at in enumerate(LAST, 1) if each.line.startswith(at)), 0),
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class Live:
    """A run with a peer at each of its two stages, and what a reader has at hand."""

    machine: Machine
    spec: Path
    opened: Path
    """As long as it is not closed."""
    invite: Path
    peers: list[Command] = field(default_factory=list)

    def values(self, out: Path) -> dict[str, str]:
        """For what the pages say in its place."""
        folder = self.machine.folder
        return {
            "/ip4/203.0.113.7/tcp/4001/p2p/12D3Koo...": self.peers[0].address,
            "/ip4/YOUR.PUBLIC.IP/": "/ip4/127.0.0.1/",
            "/dns4/peer.example.org/": "/ip4/127.0.0.1/",
            "https://ntfy.sh/TOPIC": f"http://127.0.0.1:{free_port()}/",
            "https://hooks.slack.com/services/...": f"http://127.0.0.1:{free_port()}/",
            "swarmnet-invite-...": self.invite.read_text().strip(),
            "12D3Koo...": self.peers[1].peer_id,
            " 4001": f" {free_port()}",
            "/tcp/4001": f"/tcp/{free_port()}",
            "8080": str(free_port()),
            "8000": str(free_port()),
            " run.toml": f" {self.spec}",
            " run.jsonl": f" {folder / 'first.jsonl'}",
            " examples/": f" {ROOT}/examples/",
            " owner.key": f" {folder / 'owner.key'}",
            " invite.txt": f" {self.invite}",
            "FILE": str(self.invite),
            "ADDRESS": self.peers[0].address,
            "ADDR": self.peers[0].address,
            "DIR": f"{folder / 'first'} --state-dir {folder / 'second'}",
            "--out model": f"--out {out}",
            "--out adapter": f"--out {out}",
            "--out whole": f"--out {out}",
        }

    def type(self, each: Typed, name: str, *more: str, out: Path) -> Command:
        """Starts a command of a page."""
        values = self.values(out)
        if each.command == "local":
            values[" run.toml"] = f" {self.opened}"
        words, target, _ = with_values(each.line, values)
        assert not target, "none of these is written to a file"
        environment = {"SWARMNET_INVITE": self.invite.read_text().strip()}
        if "--watch" in words:  # a screen, which is drawn on a terminal only
            environment["FORCE_COLOR"] = "1"
        variable, sign, value = each.line.split(" ")[0].partition("=")
        if sign and variable.isupper():
            environment[variable] = values.get(value, value)
        if each.command == "local" or "--tp" in words:  # they start others, and do not fork
            return self.machine.start(
                name, *words, *more, environment=environment, command=SWARMNET
            )
        return self.machine.start(name, *words, *more, environment=environment)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with machine() as running:
        folder = running.folder
        folder_of(folder / "small", "llama", num_key_value_heads=4)
        (folder / "small" / "chat_template.jinja").write_text(TEMPLATE)
        text = tiny_run(folder, rounds=100_000).read_text()
        kept = text[text.index("[data]") :].replace('tokenizer = "bytes"\n', "")
        kept = kept.replace("evaluate_every = 0", "evaluate_every = 2")
        opened = folder / "open.toml"
        opened.write_text(
            f'[model]\nfrom = "{folder / "small"}"\n[lora]\nr = 2\n'
            + kept.replace("[optimizer]", "sequence_length = 16\n[optimizer]")
        )
        spec, key, invite = folder / "run.toml", folder / "owner.key", folder / "invite.txt"
        spec.write_text(opened.read_text() + printed("invite", "--key", str(key)))
        invite.write_text(printed("invite", "--key", str(key), "--spec", str(spec)))
        found = Live(running, spec, opened, invite)
        more = ("--invite", str(invite), "--checkpoint-every", "1", *SPARING)
        first = running.start_peer("first", "--spec", str(spec), "--stage", "0", *more)
        running.until_ready(first)
        joins = ("--join", first.address, "--stage", "1", *more)
        found.peers = [first, running.start_peer("second", *joins)]
        running.until_ready(*found.peers)
        running.until_round(first, 6)
        yield found


def printed(*words: str) -> str:
    """By a command in this process."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert run_command(words) == 0
    return out.getvalue()


@pytest.mark.parametrize("each", BESIDE, ids=lambda each: each.line)
def test_a_command_does_what_it_says(each: Typed, live: Live) -> None:
    number = BESIDE.index(each)
    name, out = f"typed-{number}", live.machine.folder / f"out-{number}"
    CHECKS[each.command](live, each, name, out)


def _peer(live: Live, each: Typed, name: str, out: Path) -> None:
    """It listens, and leaves when it is told to."""
    ready = live.machine.folder / f"{name}.ready"
    more = ("--plain", "--host", "127.0.0.1", "--threads", "1")
    state = ("--state-dir", str(live.machine.folder / name), "--ready-file", str(ready))
    started = live.type(each, name, *more, *state, out=out)
    live.machine.until_ready(started)
    live.machine.interrupt(started)
    assert live.machine.wait(started, 180.0) == 0, started.describe()


def _local(live: Live, each: Typed, name: str, out: Path) -> None:
    """It trains, to its end. Rounds after the second are more of the same."""
    started = live.type(each, name, "--plain", "--rounds", "2", out=out)
    assert live.machine.wait(started, 600.0) == 0, started.describe()
    assert re.search(r"^rounds +2$", started.output(), re.MULTILINE), started.output()


def _ends(live: Live, each: Typed, name: str, out: Path) -> None:
    """It prints something, and is done."""
    started = live.type(each, name, out=out)
    assert live.machine.wait(started) == 0, started.describe()
    assert started.output().strip()


def _status(live: Live, each: Typed, name: str, out: Path) -> None:
    if "--watch" not in each.line:
        _ends(live, each, name, out)
        return
    started = live.type(each, name, out=out)
    live.machine.until(lambda: "stage" in started.output())
    live.machine.interrupt(started)
    assert live.machine.wait(started) == 0, started.describe()


def _doctor(live: Live, each: Typed, name: str, out: Path) -> None:
    """It says what it found; what a machine has, and lacks, is the machine's."""
    started = live.type(each, name, out=out)
    assert live.machine.wait(started) in (0, 1), started.describe()
    assert "python" in started.output().lower()


def _export(live: Live, each: Typed, name: str, out: Path) -> None:
    _ends(live, each, name, out)
    weights = "model" if "--merge" in each.line else "adapter_model"
    assert (out / f"{weights}.safetensors").is_file(), list(out.iterdir())


def _generate(live: Live, each: Typed, name: str, out: Path) -> None:
    if "--serve" not in each.line:
        started = live.type(each, name, "--max-new-tokens", "4", out=out)
        assert live.machine.wait(started) == 0, started.describe()
        return
    port = str(free_port())
    started = live.type(Typed(each.page, each.line.replace("8000", port), False), name, out=out)
    _until_served(live, started, f"http://127.0.0.1:{port}/v1/models")


def _dashboard(live: Live, each: Typed, name: str, out: Path) -> None:
    port = str(free_port())
    started = live.type(each, name, "--port", port, out=out)
    _until_served(live, started, f"http://127.0.0.1:{port}/")


def _until_served(live: Live, started: Command, url: str) -> None:
    def answers() -> bool:
        assert started.process.poll() is None, started.describe()
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return bool(answer.status == 200 and answer.read())
        except OSError:
            return False

    live.machine.until(answers)
    live.machine.interrupt(started)
    assert live.machine.wait(started) == 0, started.describe()


def _stop(live: Live, each: Typed, name: str, out: Path) -> None:
    """For all: the peers of the run end too."""
    _ends(live, each, name, out)
    for peer in live.peers:
        live.machine.wait(peer)


CHECKS = {
    "dashboard": _dashboard,
    "doctor": _doctor,
    "export": _export,
    "generate": _generate,
    "invite": _ends,
    "local": _local,
    "peer": _peer,
    "plan": _ends,
    "status": _status,
    "stop": _stop,
}
