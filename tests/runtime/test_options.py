"""Options, as a command line says them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from peer.option_groups import command
from swarmnet.runtime.options import (
    ComputeOptions,
    LinkOptions,
    LocalChoices,
    PeerChoices,
    arguments_for,
)

OTHERS: dict[str, Any] = {
    "spec": Path("run.toml"),
    "join": ("/ip4/1.2.3.4/tcp/1/p2p/a", "/ip4/1.2.3.4/tcp/1/p2p/b"),
    "stages": "auto",
    "patience_s": 2.5,
    "data": ("a=x.txt", "y.txt"),
    "fetch_data": False,
    "weights": Path("model"),
    "state_dir": Path("state"),
    "transport": "p2pd",
    "device": "cpu",
    "precision": "bf16",
    "activations": "blocks",
    "optimizer_memory": "host",
    "weights_memory": "host",
    "max_device_memory": "8GB",
    "local": "fsdp",
    "announce": ("/ip4/1.2.3.4/tcp/1",),
    "household": Path("house.key"),
    "keep_checkpoints": 5,
}
"""What is not the default, where a number, a flag or a name would not do."""


@dataclass(frozen=True)
class Debug:
    debug: Annotated[bool, typer.Option("--debug")] = False


def other(name: str, default: Any) -> Any:
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(default, bool):
        return not default
    return 3 if default is None or isinstance(default, int) else "x"


@pytest.mark.parametrize("kind", [PeerChoices, LocalChoices])
def test_a_command_understands_what_is_said_of_its_options(kind: type[Any]) -> None:
    said: list[Any] = []
    app = typer.Typer()

    def go(options: Any, more: Any) -> None:
        said.append(options)

    go.__annotations__ = {"options": kind, "more": Debug}
    command(app, lambda _: nullcontext())(go)
    assert arguments_for(kind(), kind) == []
    for field in fields(kind):
        options = replace(kind(), **{field.name: other(field.name, field.default)})
        words = arguments_for(options, kind)
        assert words, field.name
        assert CliRunner().invoke(app, words).exit_code == 0, words
        assert said.pop() == options


def test_a_group_is_said_alone() -> None:
    choices = LocalChoices(num_peers=2, direct=False, device="cpu", sequence_parallel=True)
    assert arguments_for(choices, LinkOptions) == ["--no-direct"]
    assert arguments_for(choices, ComputeOptions) == ["--device", "cpu", "--sequence-parallel"]


def test_a_flag_of_two_words_is_said_by_either() -> None:
    assert arguments_for(PeerChoices(fetch_data=True), PeerChoices) == ["--fetch-data"]
    assert arguments_for(PeerChoices(fetch_data=False), PeerChoices) == ["--no-fetch-data"]
