"""What a peer of the default run takes before it does anything, and what installing it takes.

    python benchmarks/start.py [--transport auto] [--stage 1]

Prints: how long `import swarmnet` takes beyond an empty Python (the least of some tries); the CPU
seconds of a peer, its daemon and other children included, until it listens and until it serves its
stage; the memory that they have while it waits for another stage that nobody serves, with nothing
under way at stage 1, and with the first microbatches at stage 0; the bytes of all packages that
`pip install .` brings (this Python's own left out), largest first. Linux only.

Memory is said twice: what is of no file (anonymous pages), and with the peer's part of the pages of
libraries (PSS: divided by the processes that have them now, so that it depends on what else
runs)."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from swarmnet.needs import APART, DISTRIBUTION
from swarmnet.runtime.options import default_spec_path

TRIES = 5
IDLE_AFTER_S = 20.0
LIMIT_S = 180.0
NAMED = 8
MB = 1e6


def import_s() -> float:
    """Of `import swarmnet`, beyond what Python takes."""

    def least(code: str) -> float:
        found = []
        for _ in range(TRIES):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            found.append(time.perf_counter() - began)
        return min(found)

    return least("import swarmnet") - least("pass")


def installed_bytes() -> dict[str, int]:
    """By package, of all that the requirements without extras bring in this environment."""
    todo, found = [DISTRIBUTION, *APART], dict[str, int]()
    while todo:
        name = canonicalize_name(todo.pop())
        if name in found:
            continue
        about = metadata.distribution(name)
        files = (Path(str(about.locate_file(f))) for f in about.files or [])
        found[name] = sum(path.stat().st_size for path in files if path.is_file())
        if name not in APART:
            wanted = map(Requirement, about.requires or [])
            todo += [r.name for r in wanted if not r.marker or r.marker.evaluate({"extra": ""})]
    return found


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def cpu_s(pid: int) -> float:
    """Of the process and its children, those that have ended included."""
    total = 0.0
    for process in family(pid):
        times = process.cpu_times()
        total += times.user + times.system
    ended = psutil.Process(pid).cpu_times()
    return total + ended.children_user + ended.children_system


def memory_bytes(pid: int) -> dict[str, tuple[int, int]]:
    """By command, of each process of the family: anonymous, and PSS."""
    found = {}
    for process in family(pid):
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
        kib = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
        found[f"{process.name()} {process.pid}"] = 1024 * kib["Anonymous"], 1024 * kib["Pss"]
    return found


def start(transport: str, stage: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ready, metrics = Path(folder) / "ready", Path(folder) / "metrics"
        arguments = ["peer", "--plain", "--host", "127.0.0.1", "--transport", transport]
        arguments += ["--state-dir", f"{folder}/state", "--ready-file", str(ready)]
        arguments += [
            "--spec",
            str(default_spec_path()),
            "--stage",
            str(stage),
            "--threads",
            "1",
            "--metrics",
            str(metrics),
            "--debug",
        ]
        with (Path(folder) / "err").open("w+b") as err:
            command = [sys.executable, "-m", "peer", *arguments]
            peer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err)
            try:
                end = time.monotonic() + LIMIT_S
                while not ready.exists() and time.monotonic() < end and peer.poll() is None:
                    time.sleep(0.05)
                if not ready.exists():
                    raise SystemExit(Path(err.name).read_text(errors="replace")[-2000:])
                print(f"CPU seconds until it listens: {cpu_s(peer.pid):.1f}")
                time.sleep(IDLE_AFTER_S)
                first = cpu_s(peer.pid)
                print(f"CPU seconds until it serves and waits: {first:.1f}")
                time.sleep(IDLE_AFTER_S)
                idle = (cpu_s(peer.pid) - first) / IDLE_AFTER_S
                print(f"of a core while it waits: {100 * idle:.1f} %")
                memory = memory_bytes(peer.pid)
                own, shared = (sum(each) / MB for each in zip(*memory.values(), strict=True))
                print(f"memory while it waits: {own:.0f} MB, PSS {shared:.0f} MB", end=" (")
                each = (f"{name}: {one / MB:.0f}" for name, (one, _) in memory.items())
                print("anonymous " + "; ".join(each) + ")")
            finally:
                peer.terminate()
                peer.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"import swarmnet: {1000 * import_s():.0f} ms beyond an empty Python")
    sizes = installed_bytes()
    if options.json:
        options.json.write_text(json.dumps(sizes, indent=1) + "\n")
    largest = sorted(sizes, key=lambda name: -sizes[name])[:NAMED]
    print(f"installed: {sum(sizes.values()) / MB:,.0f} MB", end=" (")
    print("; ".join(f"{name} {sizes[name] / MB:,.0f}" for name in largest) + ")")
    start(options.transport, options.stage)


if __name__ == "__main__":
    main()
