"""Whether every package of constraints.txt can be installed without a compiler: what the package
index has of each is in wheels.json. `python -m tests.wheels` asks the index anew, after a change of
constraints.txt."""

from __future__ import annotations

import io
import json
import re
import tarfile
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_name("wheels.json")
INDEX = "https://pypi.org/simple"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
PLATFORMS = [f"{python} {machine}" for python in PYTHONS for machine in MACHINES]
GLIBC_MINOR = 36
"""Of Debian 12, the oldest that has Python 3.11."""
COMPILED = re.compile(r"\.(c|cc|cpp|cxx|cu|f90|go|pyx|rs|zig)$|(^|/)(Cargo\.toml|CMakeLists\.txt)$")


def pins() -> dict[str, str]:
    """Version by canonical name, of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().split()
    return {canonicalize_name(name): v for name, v in (line.split("==") for line in lines)}


def requirements() -> list[Requirement]:
    """Of pyproject.toml, those of every extra included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(line) for lines in lists for line in lines]


def to_compile(record: dict[str, Any], name: str) -> list[str]:
    """The platforms on which pip would have to compile a pinned package, of those on which
    pyproject.toml asks for it."""
    about = record[f"{name}=={pins()[name]}"]
    if about.get("source") == "pure":
        return []
    asked = [r for r in requirements() if canonicalize_name(r.name) == name]
    missing = [p for p in PLATFORMS if p not in about.get("wheels", PLATFORMS)]
    return [p for p in missing if not asked or any(_applies(r, p) for r in asked)]


def _applies(requirement: Requirement, platform: str) -> bool:
    python, machine = platform.split()
    environment = default_environment() | {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "platform_system": "Linux",
        "sys_platform": "linux",
    }
    return requirement.marker is None or requirement.marker.evaluate(environment)  # type: ignore[arg-type]


# ---- asking the index -----------------------------------------------------------------------


def look() -> dict[str, Any]:
    """By `name==version`: `wheels`, the platforms that have one, where some have none; `source`:
    pure, or a file in it that has to be compiled, where some need it."""
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda pin: (f"{pin[0]}=={pin[1]}", _look_at(*pin)), pins().items())
    return dict(sorted(found))


def _look_at(name: str, version: str) -> dict[str, Any]:
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    request = urllib.request.Request(f"{INDEX}/{name}/", headers=accept)
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.load(answer)["files"]
    wheels = [tags for f in files if (tags := _tags(f["filename"], version))]
    having = [p for p in PLATFORMS if any(tags & set(_taken(p)) for tags in wheels)]
    if having == PLATFORMS:
        return {}
    sources = [f for f in files if _is_source(f["filename"], name, version)]
    return {"wheels": having, "source": _what_is_compiled(sources[0]) if sources else "none"}


def _tags(filename: str, version: str) -> frozenset[Tag]:
    try:
        _, found, _, tags = parse_wheel_filename(filename)
    except InvalidWheelFilename:
        return frozenset()
    return tags if found == Version(version) else frozenset()


def _taken(platform: str) -> Iterator[Tag]:
    """What pip takes there, on Debian 12."""
    python, machine = platform.split()
    version = (3, int(python.partition(".")[2]))
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC_MINOR, 4, -1)]
    platforms += [f"manylinux{year}_{machine}" for year in ("2014", "2010", "1")]
    yield from cpython_tags(version, platforms=platforms)
    yield from compatible_tags(version, f"cp{version[0]}{version[1]}", platforms)


def _is_source(filename: str, name: str, version: str) -> bool:
    stem, found = filename.removesuffix(".tar.gz").removesuffix(".zip"), f"-{version}"
    is_wheel = filename.endswith(".whl")
    return not is_wheel and stem.endswith(found) and canonicalize_name(stem[: -len(found)]) == name


def _what_is_compiled(file: dict[str, Any]) -> str:
    with urllib.request.urlopen(file["url"], timeout=120) as answer:
        content = io.BytesIO(answer.read())
    if file["filename"].endswith(".zip"):
        names = zipfile.ZipFile(content).namelist()
    else:
        with tarfile.open(fileobj=content) as archive:
            names = archive.getnames()
    return next((name for name in names if COMPILED.search(name)), "pure")


if __name__ == "__main__":
    RECORD.write_text(json.dumps(look(), indent=1) + "\n")
    print(f"{RECORD.name}: {len(pins())} packages")
