"""What `pip` is asked for: nothing that needs a compiler, and no package of somebody else."""

from __future__ import annotations

import ast
import asyncio
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import platforms
from peer.commands import doctor
from swarmnet import needs
from swarmnet.transport import libp2p
from tests import wheels
from tests.wheels import PLATFORMS, ROOT, pins, requirements, to_compile

RECORD = json.loads(wheels.RECORD.read_text())
CODE = [path for folder in ("swarmnet", "peer") for path in sorted((ROOT / folder).rglob("*.py"))]
KINDS = ("", ".env", ".html", ".js", ".json", ".md", ".py", ".service", ".toml", ".txt", ".yml")
TEXTS = [
    path
    for folder in ("", ".ci", "swarmnet", "peer", "docs", "examples", "benchmarks", "tests")
    for path in sorted((ROOT / folder).glob("**/*" if folder else "*"))
    if path.is_file() and path.suffix in KINDS and path != Path(__file__)
]
INSTALL = re.compile(
    r"\b(?:pip3? (?:install|download|wheel)|pipx (?:install|run)|uvx|uv (?:add|tool install)"
    r"|conda install)\b([^\n#&|;`]*)"
)


@functools.cache
def nodes() -> list[ast.AST]:
    """Imports and calls, of all of the code."""
    wanted = (ast.Import, ast.ImportFrom, ast.Call)
    trees = [ast.parse(path.read_text()) for path in CODE]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, wanted)]


def _read(path: Path) -> str:
    return path.read_text(errors="replace")


# ---- no compiler ----------------------------------------------------------------------------


def test_the_record_of_the_package_index_is_that_of_the_pins() -> None:
    """`python -m tests.wheels` brings it up to date."""
    assert set(RECORD) == {f"{name}=={version}" for name, version in pins().items()}


@pytest.mark.parametrize("name", pins())
def test_a_pinned_package_needs_no_compiler(name: str) -> None:
    """On any Python and machine for which pyproject.toml asks for it."""
    assert to_compile(RECORD, name) == []


def test_a_package_that_has_to_be_compiled_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule itself, on what the index has of a release without wheels for Linux."""
    monkeypatch.setattr(wheels, "pins", lambda: {"fastecdsa": "2.3.2", "coincurve": "21.0.0"})
    about = {"wheels": [], "source": "fastecdsa-2.3.2/src/curve.c"}
    assert to_compile({"fastecdsa==2.3.2": about}, "fastecdsa") == PLATFORMS
    assert to_compile({"fastecdsa==2.3.2": about | {"source": "pure"}}, "fastecdsa") == []
    assert to_compile({"coincurve==21.0.0": about}, "coincurve") == PLATFORMS[:6]  # not on 3.14


def test_the_page_of_platforms_has_what_pip_found() -> None:
    """`python -m benchmarks.platforms` asks it anew."""
    found = json.loads((ROOT / "benchmarks" / "results" / "platforms.json").read_text())
    page = (ROOT / "docs" / "platforms.md").read_text()
    assert platforms.table(found) in page
    assert len(found) == len(platforms.MACHINES) * len(wheels.PYTHONS)
    for machine in ("Linux x86-64", "Linux ARM", "macOS ARM"):
        assert not any(found[f"{machine} {python}"] for python in wheels.PYTHONS)


def test_what_is_asked_for_depends_on_the_machine() -> None:
    def names(python: str, machine: str) -> set[str]:
        return {Requirement(r).name for r in platforms.requirements_of(python, machine)}

    assert "hivemind" in names("3.11", "Linux x86-64")
    for machine in ("Linux ARM", "macOS ARM"):
        assert "hivemind" not in names("3.12", machine)
        assert {"torch", "uvloop", "coincurve"} <= names("3.12", machine)
    assert "coincurve" not in names("3.14", "Linux x86-64")
    assert next(platforms.tags_of("macOS ARM")) == "macosx_14_0_arm64"
    assert next(platforms.tags_of("Linux ARM")) == "manylinux_2_36_aarch64"


def test_everything_that_a_requirement_brings_is_pinned() -> None:
    """Otherwise nobody looks at whether it has to be compiled."""
    todo = [(r, "") for r in requirements()] + [(Requirement(needs.DISTRIBUTION), "-")]
    seen: set[tuple[str, str]] = set()
    missing = set()
    while todo:
        wanted, extra = todo.pop()
        name = canonicalize_name(wanted.name)
        if wanted.marker and not wanted.marker.evaluate({"extra": extra}):
            continue
        if extra != "-" and name not in pins() and name != "setuptools":
            missing.add(name)
        for extra in wanted.extras or {""}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                lines = metadata.requires(name) or []
            except metadata.PackageNotFoundError:  # of an extra that is not installed here
                continue
            todo += [(Requirement(line), extra) for line in lines]
    assert missing == set()
    assert len(seen) > 100


def test_py_libp2p_is_used_without_what_has_to_be_compiled() -> None:
    """And without most of itself."""
    code = """if True:
        import sys
        for name in ("fastecdsa", "miniupnpc", "zeroconf"):
            sys.modules[name] = None
        import swarmnet.transport.libp2p.host
        print(sum(name.startswith("libp2p.") for name in sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 150


def test_py_libp2p_is_installed_in_the_version_that_was_tried() -> None:
    """`make` and the Dockerfile take the one of constraints.txt, and a person types ours."""
    assert {"libp2p": f"libp2p=={pins()['libp2p']}"} == needs.APART
    asked = {canonicalize_name(r.name) for r in requirements()}
    assert not needs.APART.keys() & asked
    told = [t for path in TEXTS for t in re.findall(r"\blibp2p==[\d.]*\d", _read(path))]
    assert len(told) >= 4
    assert set(told) == set(needs.APART.values())
    for file in ("Makefile", "peer/Dockerfile"):
        assert re.search(r"pip install .*--no-deps libp2p$", (ROOT / file).read_text(), re.M)


def test_a_carrier_that_is_not_installed_is_one_line_with_what_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    for name in ("libp2p", f"{libp2p.__name__}.imports", f"{libp2p.__name__}.host"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(libp2p, "imports", raising=False)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "libp2p" else find(name)
    )
    options = doctor.DoctorOptions(transport="py-libp2p")
    [finding], _ = asyncio.run(doctor.check_network(options))
    assert (finding.check, finding.level) == ("carrier", doctor.BAD)
    said = f"py-libp2p is not installed: pip install --no-deps libp2p=={pins()['libp2p']}"
    assert finding.found == said


class Index:
    """A package index on loopback, with one file for pip."""

    def __init__(self, page: str) -> None:
        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(page.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ('<a href="../../files/pip-26.3-py3-none-any.whl#sha256=00">', "is not the pip-26.3"),
        ('<a href="../../files/pip-1.0.tar.gz">', "there is no pip-26.3"),
        (None, "cannot be had from http://127.0.0.1"),
    ],
)
def test_a_pip_that_is_not_the_one_that_was_tried_is_not_run(page: str | None, said: str) -> None:
    """Where Python comes without ensurepip, as on Debian and Ubuntu."""
    index = Index(page or "")
    if page is None:
        index.server.server_close()
    serving = threading.Thread(target=index.server.serve_forever)
    if page is not None:
        serving.start()
    try:
        done = subprocess.run(
            [sys.executable, str(ROOT / ".ci" / "get-pip.py")],
            env={k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
            | {"PIP_INDEX_URL": index.url},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        if page is not None:
            index.server.shutdown()
            serving.join()
            index.server.server_close()
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert said in line
    assert "python3-venv" in line


# ---- no package of somebody else ------------------------------------------------------------


def test_the_package_has_a_name_of_its_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == needs.DISTRIBUTION != "swarmnet"
    assert list(project["scripts"]) == ["swarmnet"]


def others(text: str) -> list[str]:
    """What a text says to install that this project's name on an index stands for."""
    found = re.findall(r"swarmnet(?:-train)?\[\w[\w,-]*\]", text)
    for line in INSTALL.findall(text):
        words = [word.strip("'\"`,.:)(") for word in line.split()]
        found += [w for w in words if re.fullmatch(r"swarmnet(-train)?([=<>~!].*)?", w)]
    return found


def test_no_text_installs_a_package_that_is_not_ours() -> None:
    assert len(TEXTS) > 500
    wrong = {str(path.relative_to(ROOT)): o for path in TEXTS if (o := others(_read(path)))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("`pip install 'swarmnet[models]'` brings it", 1),
        ("pip install -U swarmnet\n", 1),
        ("pip install --upgrade 'swarmnet>=0.2' torch", 1),
        ('"pip install " "swarmnet[data]"', 1),
        ("uv add swarmnet", 1),
        ("pip install '.[models]'  # swarmnet", 0),
        ("pip install -e . && swarmnet local", 0),
        ("pip install --no-deps libp2p", 0),
        ("pip uninstall swarmnet", 0),
    ],
)
def test_such_a_text_is_found(text: str, number: int) -> None:
    assert len(others(text)) == number


def test_a_missing_library_is_asked_for_by_its_name_and_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = ["torch>=2.6", 'transformers>=5.20; extra == "models"', 'Jinja2>=3.1; extra == "data"']
    monkeypatch.setattr(needs.metadata, "requires", lambda name: lines)
    asked = needs.install_command("transformers", "jinja2", "elsewhere")
    assert asked == "pip install 'transformers>=5.20' 'Jinja2>=3.1' elsewhere"
    assert needs.install_command("torch", options="-U") == "pip install -U 'torch>=2.6'"
    assert needs.install_command("libp2p").startswith("pip install --no-deps libp2p==")


def test_every_library_that_a_message_asks_for_is_one_of_our_requirements() -> None:
    """So each is named with the version that is needed."""
    known = {canonicalize_name(r.name) for r in requirements()} | set(needs.APART)
    asked = [
        argument.value
        for call in nodes()
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "install_command"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    ]
    assert len(asked) >= 6
    assert {canonicalize_name(name) for name in asked} <= known


def test_a_missing_library_is_said_before_a_model_is_downloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub

    from swarmnet.training.models.model_config import MissingModels
    from swarmnet.training.models.model_folder import find_folder

    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(MissingModels, match=r"pip install .*transformers"):
        find_folder("SomeOrganisation/some-model")


def test_every_library_that_is_imported_is_one_of_our_requirements() -> None:
    """Not one that comes along with another today. What is used where it happens to be there is
    named here."""
    known = {canonicalize_name(r.name) for r in requirements()} | set(needs.APART)
    # What it is called for pip cannot be looked up where it is not installed.
    by_module = {"mlflow": ["mlflow-skinny"], **metadata.packages_distributions()}
    if_there = {"pynvml", "triton"}
    undeclared = set()
    for node in nodes():
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for top in {name.partition(".")[0] for name in names} - sys.stdlib_module_names:
            brought_by = {canonicalize_name(d) for d in by_module.get(top, [top])}
            if top not in {"swarmnet", "peer"} | if_there and not brought_by & known:
                undeclared.add(top)
    assert undeclared == set()
