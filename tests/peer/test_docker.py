"""docker-compose.yml and peer/Dockerfile against what the command line and the repository offer.

No engine is needed: what is checked is that every command is one that `swarmnet` takes, that every
file is there, and that the services see what they tell each other to look at."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from peer.cli import app
from peer.options import INVITE_VARIABLE
from swarmnet.spec import load_spec

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "peer" / "Dockerfile").read_text()
SERVICES: dict[str, Any] = COMPOSE["services"]
STAGES = [name for name in SERVICES if name.startswith("stage-")]


def words(service: str) -> list[str]:
    return shlex.split(SERVICES[service]["command"])


def parsed(service: str) -> dict[str, Any]:
    """Its options, as the command line reads them."""
    command: Any = typer.main.get_command(app)
    name, *arguments = words(service)
    context = command.commands[name].make_context(name, list(arguments))
    return dict(context.params)


def mounts(service: str) -> dict[str, str]:
    """Source by folder inside the container."""
    parts = [volume.split(":") for volume in SERVICES[service]["volumes"]]
    return {target: source for source, target, *_ in parts}


@pytest.mark.parametrize("service", SERVICES)
def test_every_command_is_one_that_swarmnet_takes(service: str) -> None:
    assert parsed(service)
    assert SERVICES[service]["image"] == "swarmnet"
    if service == "bootstrap":
        assert SERVICES[service]["build"]["dockerfile"] == "peer/Dockerfile"
    else:
        assert "build" not in SERVICES[service], "one image is built once"


def test_the_stages_are_those_of_the_run() -> None:
    spec_path = ROOT / mounts("bootstrap")["/run.toml"]
    spec = load_spec(spec_path)
    stages = {parsed(name)["stage"] for name in STAGES}
    assert stages == set(range(spec.pipeline.num_stages))
    assert str(parsed("bootstrap")["spec"]) == "/run.toml"


def test_every_stage_has_more_than_one_replica() -> None:
    replicas: dict[int, int] = {parsed("bootstrap")["stage"]: 1}
    for name in STAGES:
        stage = parsed(name)["stage"]
        replicas[stage] = replicas.get(stage, 0) + SERVICES[name]["deploy"]["replicas"]
    assert all(n >= 2 for n in replicas.values()), "any one container may be killed"


def test_all_look_where_the_first_peer_leaves_its_address() -> None:
    where = parsed("bootstrap")["ready_file"]
    assert mounts("bootstrap")[str(where.parent)] == "rendezvous"
    for name in STAGES:
        assert parsed(name)["join"] == [f"@{where}"]
        assert mounts(name)[str(where.parent)] == "rendezvous"


def test_state_outlives_the_containers() -> None:
    state = re.search(r"XDG_STATE_HOME=(\S+)", DOCKERFILE)
    assert state is not None
    assert f"VOLUME {state[1]}" in DOCKERFILE
    for name in ("bootstrap", *STAGES):
        assert mounts(name)[state[1]] in COMPOSE["volumes"]
        assert parsed(name)["state_dir"] is None, "replicas of a service share a volume"


def test_the_dashboard_looks_at_the_run_and_is_looked_at() -> None:
    service, options = SERVICES["dashboard"], parsed("dashboard")
    where = parsed("bootstrap")["ready_file"]
    assert options["join"] == [f"@{where}"]
    assert mounts("dashboard")[str(where.parent)] == "rendezvous"
    assert service["ports"] == [f"127.0.0.1:8080:{options['port']}"]
    assert options["host"] == "0.0.0.0", "or nothing can be published"
    check = service["healthcheck"]["test"]
    assert check[:2] == ["CMD", "python3"]
    compile(check[3], "healthcheck", "exec")
    assert f":{options['port']}/healthz" in check[3]


def test_nothing_is_published_beyond_this_machine() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_image_has_no_root_and_a_health_check_that_can_fail() -> None:
    assert re.search(r"^USER (?!root)\S+", DOCKERFILE, re.M)
    assert re.search(r"^ENTRYPOINT \[\"swarmnet\"\]", DOCKERFILE, re.M)
    variable = re.search(r"HEALTHCHECK[^\n]*\\\n\s+CMD find \"\$(\w+)\"", DOCKERFILE)
    assert variable is not None
    command: Any = typer.main.get_command(app)
    of_peer = {p.name: p.envvar for p in command.commands["peer"].params}
    assert of_peer["health_file"] == variable[1]
    assert of_peer["invite"] == INVITE_VARIABLE


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [
        name
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.M)
        for name in line.split()[:-1]
    ]
    assert "pyproject.toml" in copied
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored
