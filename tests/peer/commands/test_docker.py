"""docker-compose.yml and peer/Dockerfile against what the command line and the repository offer.

No engine is needed: what is checked is that compose takes the files, that every command is one that
`swarmnet` takes, that every file is there, and that the services see what they tell each other to
look at."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import compose
import pytest
import typer.main
import yaml

from peer.cli import app
from swarmnet.runtime.options import INVITE_VARIABLE
from swarmnet.spec import load_spec

ROOT = Path(__file__).parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
ADDRESS = "/ip4/203.0.113.7/tcp/4001"
DOCKERFILE = (ROOT / "peer" / "Dockerfile").read_text()
SERVICES: dict[str, Any] = COMPOSE["services"]
STAGES = [name for name in SERVICES if name.startswith("stage-")]


def filled(text: str) -> str:
    """With the defaults of what an environment may set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def words(service: str) -> list[str]:
    return shlex.split(filled(SERVICES[service]["command"]))


def parsed(service: str) -> dict[str, Any]:
    """Its options, as the command line reads them."""
    command: Any = typer.main.get_command(app)
    name, *arguments = words(service)
    context = command.commands[name].make_context(name, list(arguments))
    return dict(context.params)


def mounts(service: str) -> dict[str, str]:
    """Source by folder inside the container."""
    found = {}
    for volume in SERVICES[service]["volumes"]:
        if isinstance(volume, dict):
            found[volume["target"]] = filled(volume["source"])
        else:
            source, target, *_ = volume.split(":")
            found[target] = source
    return found


@pytest.mark.parametrize("more", [(), ("gpu",), ("public",), ("gpu", "public")])
def test_compose_takes_the_files(more: tuple[str, ...]) -> None:
    """Compose itself, as PyPI has it; `config` needs no engine."""
    files = [ROOT / "docker-compose.yml", *(ROOT / f"examples/compose.{name}.yml" for name in more)]
    binary = Path(compose.__file__).with_name("docker-compose")
    command = [str(binary), *(word for file in files for word in ("-f", str(file))), "config", "-q"]
    environment = {k: v for k, v in os.environ.items() if k != "ANNOUNCE"}
    for announce in ({}, {"ANNOUNCE": "/ip4/203.0.113.7/tcp/4001"}):
        done = subprocess.run(
            command, env=environment | announce, capture_output=True, text=True, check=False
        )
        if "public" in more and not announce:
            assert done.returncode != 0
            assert "set ANNOUNCE" in done.stderr
        else:
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_every_command_is_one_that_swarmnet_takes(service: str) -> None:
    assert parsed(service)
    assert SERVICES[service]["image"] == "swarmnet"
    assert SERVICES[service]["pull_policy"] == "never", "no registry has it"
    if service == "bootstrap":
        assert SERVICES[service]["build"]["dockerfile"] == "peer/Dockerfile"
    else:
        assert "build" not in SERVICES[service], "one image is built once"


def test_the_stages_are_those_of_the_run() -> None:
    where = parsed("bootstrap")["spec"]
    spec = load_spec(ROOT / mounts("bootstrap")[str(where.parent)] / where.name)
    stages = {parsed(name)["stage"] for name in STAGES}
    assert stages == set(range(spec.pipeline.num_stages))


def test_a_folder_with_runs_that_is_not_there_is_not_made() -> None:
    (folder,) = (v for v in SERVICES["bootstrap"]["volumes"] if isinstance(v, dict))
    assert folder["bind"] == {"create_host_path": False}
    assert folder["read_only"]


def test_every_stage_has_more_than_one_replica() -> None:
    replicas: dict[int, int] = {parsed("bootstrap")["stage"]: 1}
    for name in STAGES:
        stage = parsed(name)["stage"]
        replicas[stage] = replicas.get(stage, 0) + SERVICES[name]["deploy"]["replicas"]
    assert all(n >= 2 for n in replicas.values()), "any one container may be killed"


def test_every_peer_leaves_its_address_where_all_look() -> None:
    """So that any one container that is alive is a way in."""
    where = Path("/rendezvous")
    for name in ("bootstrap", *STAGES):
        assert Path(parsed(name)["ready_file"]) == where
        assert mounts(name)[str(where)] == "rendezvous"
        assert f"rendezvous:{where}" in SERVICES[name]["volumes"], "it can be written"
    for name in (*STAGES, "dashboard"):
        assert parsed(name)["join"] == [f"@{where}"]


def test_state_outlives_the_containers() -> None:
    state = re.search(r"XDG_STATE_HOME=(\S+)", DOCKERFILE)
    assert state is not None
    assert "\nVOLUME" not in DOCKERFILE, "it leaves nameless volumes behind"
    for name in ("bootstrap", *STAGES):
        assert mounts(name)[state[1]] in COMPOSE["volumes"]
        assert parsed(name)["state_dir"] is None, "replicas of a service share a volume"


def test_the_dashboard_looks_at_the_run_and_is_looked_at() -> None:
    service, options = SERVICES["dashboard"], parsed("dashboard")
    assert mounts("dashboard")["/rendezvous"] == "rendezvous"
    assert [filled(port) for port in service["ports"]] == [f"127.0.0.1:8080:{options['port']}"]
    assert options["host"] == "0.0.0.0", "or nothing can be published"
    check = service["healthcheck"]["test"]
    assert check[:2] == ["CMD", "python3"]
    compile(check[3], "healthcheck", "exec")
    assert f":{options['port']}/healthz" in check[3]


def test_nothing_is_published_beyond_this_machine() -> None:
    ports = [filled(port) for service in SERVICES.values() for port in service.get("ports", [])]
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


@pytest.mark.parametrize("healthy", [True, False, None])
def test_the_health_check_believes_the_file_only_while_it_is_new(
    tmp_path: Path, healthy: bool | None
) -> None:
    """`None`: written two minutes ago."""
    (check,) = re.findall(r"HEALTHCHECK[^\n]*\\\n\s+CMD (.+)", DOCKERFILE)
    file = tmp_path / "health"
    file.write_text(json.dumps({"healthy": healthy is not False, "why": ""}) + "\n")
    if healthy is None:
        then = time.time() - 120.0
        os.utime(file, (then, then))
    environment = os.environ | {"SWARMNET_HEALTH_FILE": str(file)}
    done = subprocess.run(["sh", "-c", check], env=environment, capture_output=True, check=False)
    assert (done.returncode == 0) == (healthy is True)
    file.unlink()
    done = subprocess.run(["sh", "-c", check], env=environment, capture_output=True, check=False)
    assert done.returncode != 0


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_can_do_little_harm(service: str) -> None:
    settings = SERVICES[service]
    assert settings["read_only"]
    assert settings["cap_drop"] == ["ALL"]
    assert settings["security_opt"] == ["no-new-privileges:true"]
    assert settings["mem_limit"]
    assert settings["pids_limit"]
    assert settings["logging"]["options"].keys() == {"max-size", "max-file"}


def test_what_can_be_set_is_named_in_one_file() -> None:
    """With the values that it has without one."""
    example = (ROOT / "examples" / "compose.env").read_text()
    named = dict(re.findall(r"^#?(\w+)=(.*)$", example, re.M))
    files = [ROOT / "docker-compose.yml", *(ROOT / "examples").glob("compose.*.yml")]
    used = [re.findall(r"\$\{(\w+)(?::-([^}]*))?", f.read_text()) for f in files]
    assert {name for pairs in used for name, _ in pairs} == named.keys()
    assert all(named[name] == default for pairs in used for name, default in pairs if default)


def test_the_other_compose_files_change_services_that_are_there() -> None:
    for file in (ROOT / "examples").glob("compose.*.yml"):
        services = yaml.safe_load(file.read_text())["services"]
        assert services.keys() <= SERVICES.keys()
        for name, changes in services.items():
            if "command" in changes:
                there = re.sub(r"--announce .*", "", filled(changes["command"]), flags=re.S)
                assert shlex.split(there) == words(name)


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


def test_both_ports_of_a_public_peer_are_published() -> None:
    public: dict[str, Any] = yaml.safe_load((ROOT / "examples/compose.public.yml").read_text())
    service = public["services"]["bootstrap"]
    name, *arguments = shlex.split(
        filled(re.sub(r"\$\{ANNOUNCE[^}]*\}", ADDRESS, service["command"]))
    )
    command: Any = typer.main.get_command(app)
    options = command.commands[name].make_context(name, list(arguments)).params
    ports = [str(options["port"]), str(options["direct_port"])]
    assert [filled(port).split(":")[1] for port in service["ports"]] == ports
    assert filled(service["ports"][1]) == f"{ports[1]}:{ports[1]}", "others are told that number"
    assert f"EXPOSE {' '.join(ports)}" in DOCKERFILE


def test_any_user_can_write_where_peers_keep_things() -> None:
    """`--user` may name anybody; what is created there is for its own user alone."""
    (made,) = re.findall(r"install -d .*", DOCKERFILE)
    assert shlex.split(made)[-4:] == ["-m", "1777", "/state", "/rendezvous"]
