"""Whether pip would install swarmnet, with all that it asks for, on other machines and Pythons than
this one, from wheels alone.

    python -m benchmarks.platforms ["macOS ARM" ...]

What it found is in benchmarks/results/platforms.json, and the table of it in docs/platforms.md. It
asks the package index anew, of all machines or of those that are named, and takes minutes.

pip is asked for the whole tree at once (`--dry-run --only-binary :all:`), in the versions of
constraints.txt. It reads the markers of requirements as of the machine that it runs on, so it is
told what the other one would say. torch is looked at without the libraries of CUDA. What has no
wheel anywhere and nothing to compile (`SOURCES_ONLY`) is built here first; what has none for a
machine is noted, and the rest is looked at
as if it were there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from swarmnet.needs import APART
from tests.wheels import GLIBC_MINOR, PYTHONS, ROOT, pins

RECORD = ROOT / "benchmarks" / "results" / "platforms.json"
PIP = "26.3"
"""From 25 on pip resolves by metadata, without the files."""
SOURCES_ONLY = ("prefetch-generator", "python-baseconv", "varint")
"""Pure Python, and published as sources alone; pip builds them without a compiler."""
PARTS = ("", "data", "models")
"""What users install: swarmnet, and its extras."""
MACHINES = {
    "Linux x86-64": ("linux", "Linux", "x86_64"),
    "Linux ARM": ("linux", "Linux", "aarch64"),
    "macOS ARM": ("darwin", "Darwin", "arm64"),
    "macOS x86-64": ("darwin", "Darwin", "x86_64"),
}
"""`sys_platform`, `platform_system`, `platform_machine`."""
MACOS = "14_0"
MAX_MISSING = 12
WITH_MARKERS = """
import json, sys
from pip._vendor.packaging import markers
here = markers.default_environment()
told = json.loads(sys.argv.pop(1))
markers.default_environment = lambda: here | told
from pip._internal.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
MISSING = re.compile(
    r"No matching distribution found for ([A-Za-z0-9._-]+)|Cannot install ([A-Za-z0-9._-]+)"
)


def requirements_of(python: str, machine: str) -> list[str]:
    """What pyproject.toml and `make install` ask for there, `PARTS` included."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][p] for p in PARTS if p)]
    there = default_environment() | environment_of(python, machine)
    asked = [Requirement(line) for lines in lists for line in lines]
    return sorted(
        {f"{r.name}{r.specifier}" for r in asked if r.marker is None or r.marker.evaluate(there)}  # type: ignore[arg-type]
    )


def environment_of(python: str, machine: str) -> dict[str, str]:
    """What markers say on another machine."""
    sys_platform, system, hardware = MACHINES[machine]
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_version": f"{python}.0",
        "sys_platform": sys_platform,
        "platform_system": system,
        "platform_machine": hardware,
    }


def tags_of(machine: str) -> Iterator[str]:
    """The platforms of wheels that fit there: Debian 12 or newer, macOS 14 or newer."""
    sys_platform, _, hardware = MACHINES[machine]
    if sys_platform == "darwin":
        yield f"macosx_{MACOS}_{hardware}"
        return
    yield from (f"manylinux_2_{minor}_{hardware}" for minor in range(GLIBC_MINOR, 4, -1))
    yield from (f"manylinux{year}_{hardware}" for year in ("2014", "2010", "1"))
    yield f"linux_{hardware}"


# ---- asking pip -----------------------------------------------------------------------------


def look(machines: Sequence[str]) -> dict[str, list[str]]:
    """By machine and Python: the packages that have no wheel there."""
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        pip = _pip(Path(folder))
        wheels = Path(folder) / "wheels"
        names = [f"{name}=={pins()[name]}" for name in SOURCES_ONLY]
        options = ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), *names]
        subprocess.run([*pip, "{}", *options], check=True, env=_environment())
        for machine in machines:
            for python in PYTHONS:
                found[f"{machine} {python}"] = _missing(pip, wheels, machine, python)
                print(machine, python, found[f"{machine} {python}"], flush=True)
    return found


def _pip(folder: Path) -> list[str]:
    """A pip of its own, which is told what machine it is on."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = str(folder / "venv" / "bin" / "python")
    get = [python, "-m", "pip", "install", "--quiet", f"pip=={PIP}", "setuptools"]
    subprocess.run(get, check=True, env=_environment())
    return [python, "-c", WITH_MARKERS]


def _environment() -> dict[str, str]:
    """Without what this machine has been told about wheels of its own."""
    told = {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {k: v for k, v in os.environ.items() if k not in ("PIP_FIND_LINKS", "PYTHONPATH")} | told


def _missing(pip: list[str], wheels: Path, machine: str, python: str) -> list[str]:
    missing: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        stubs = Path(folder)
        while len(missing) < MAX_MISSING:
            name = _try(pip, [wheels, stubs], machine, python)
            if name is None:
                break
            missing.append(name)
            _stub(stubs, name, pins()[name])
    return sorted(missing)


def _try(pip: list[str], links: list[Path], machine: str, python: str) -> str | None:
    """The first package without a wheel; None where all have one."""
    for options, wanted in (
        ([], requirements_of(python, machine)),
        (["--no-deps"], list(APART.values())),
    ):
        arguments = ["install", "--quiet", "--dry-run", "--only-binary", ":all:", *options]
        arguments += ["--ignore-installed", "--python-version", python, "--implementation", "cp"]
        arguments += [f"--platform={tag}" for tag in tags_of(machine)]
        arguments += [f"--find-links={link}" for link in links]
        arguments += ["--target", str(links[-1] / "none"), "-c", str(ROOT / "constraints.txt")]
        # torch's requirements with this marker are CUDA's libraries, which are gigabytes.
        markers = json.dumps(environment_of(python, machine) | {"platform_system": "none"})
        command = [*pip, markers, *arguments, *wanted]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment())
        if done.returncode:
            name = MISSING.search(done.stderr)
            if name is None:
                raise RuntimeError(f"{machine}, Python {python}: {done.stderr[-2000:]}")
            return canonicalize_name(name.group(1) or name.group(2))
    return None


def _stub(folder: Path, name: str, version: str) -> None:
    """A wheel of nothing, so that pip goes on."""
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        about = f"{stem}.dist-info"
        wheel.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")


# ---- the page -------------------------------------------------------------------------------


def table(found: dict[str, list[str]]) -> str:
    """In Markdown: a row for each machine, a column for each Python."""
    lines = [f"| | {' | '.join(PYTHONS)} |", "|---|" + "---|" * len(PYTHONS)]
    for machine in MACHINES:
        cells = [", ".join(found[f"{machine} {python}"]) or "yes" for python in PYTHONS]
        lines.append(f"| {machine} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    known |= look(sys.argv[1:] or list(MACHINES))
    RECORD.write_text(json.dumps(known, indent=1) + "\n")
    print(table(known))
