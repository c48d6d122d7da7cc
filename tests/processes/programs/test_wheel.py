"""A wheel works where there is no clone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from peer.commands.example import EXAMPLES
from tests.processes.running import SWARMNET, Machine

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
SOURCES = ("swarmnet", "peer", "examples", "pyproject.toml", "README.md", "LICENSE")


def installed(folder: Path) -> Path:
    """The packages of a wheel that was built from the sources, in a place of their own."""
    clone, wheels, prefix = folder / "clone", folder / "wheels", folder / "prefix"
    clone.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, clone / name)
        else:
            shutil.copy(ROOT / name, clone)
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    build = (
        "wheel",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "-w",
        str(wheels),
        str(clone),
    )
    subprocess.run([*pip, *build], check=True)
    shutil.rmtree(clone)
    (wheel,) = wheels.iterdir()
    place = ("--prefix", str(prefix), "--ignore-installed", "--no-deps", "--no-index")
    subprocess.run([*pip, "install", *place, str(wheel)], check=True)
    (packages,) = prefix.glob("lib/python*/site-packages")
    return packages


def test_a_wheel_runs_and_brings_what_a_person_types_and_reads(running: Machine) -> None:
    packages = installed(running.folder)
    page = packages.parents[2] / "share" / "man" / "man1" / "swarmnet.1"
    elsewhere = running.folder / "elsewhere"
    elsewhere.mkdir()
    environment = {"PYTHONPATH": str(packages)}
    for name, files in EXAMPLES.items():
        done = subprocess.run(
            [*SWARMNET, "example", name],
            cwd=elsewhere,
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        for each in files:
            assert (elsewhere / "examples" / each).read_bytes() == (
                ROOT / "examples" / each
            ).read_bytes()
    for words, said in (
        (("completion", "bash"), "complete -o default"),
        (("man",), ".SH COMMANDS"),
    ):
        done = subprocess.run(
            [*SWARMNET, *words],
            cwd=elsewhere,
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        assert said in done.stdout, done.stderr
    assert done.stdout == page.read_text()
    program = (
        "import os, sys; os.chdir(sys.argv.pop(1)); import peer.cli as c; "
        "print(c.__file__, flush=True); c.main()"
    )
    metrics = running.folder / "local.jsonl"
    local = running.start(
        "local",
        str(elsewhere),
        *("local", "--peers", "2", "--rounds", "3", "--plain", "--metrics", str(metrics)),
        command=(sys.executable, "-c", program),
        environment=environment,
    )
    assert running.wait(local, 240.0) == 0, running.describe()
    assert local.output().startswith(str(packages)), "another installation was run"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert max(line["round"] for line in lines if line["event"] == "round") == 2
