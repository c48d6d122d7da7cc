"""The other ranks of a peer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swarmnet.errors import UserError
from swarmnet.runtime.options import PeerOptions
from swarmnet.runtime.ranks import open_ranks
from swarmnet.spec import load_spec
from tests.training.specs import small_spec

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_model.toml"


def test_ranks_build_from_this_machines_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that came over the network names a path; what runs is what this peer's person named."""
    told: list[Any] = []
    monkeypatch.setattr(
        "swarmnet.training.ranks.local_group.LocalGroup",
        lambda num_ranks, **options: told.append(options["options"]),
    )
    spec = load_spec(EXAMPLE)
    joins = {"join": ("x",), "tp": 2, "local": "fsdp"}
    with pytest.raises(UserError, match="add --builder"):
        open_ranks(spec, PeerOptions(tmp_path, **joins))  # type: ignore[arg-type]
    assert not told, "no rank was started"
    mine = f"{EXAMPLE.with_suffix('.py')}:build"
    open_ranks(spec, PeerOptions(tmp_path, builder=mine, **joins))  # type: ignore[arg-type]
    assert json.loads(told[0]["spec"])["model"]["builder"] == mine


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"local": "fsdp"}, "--local fsdp has no effect"),
        ({"sequence_parallel": True}, "--sequence-parallel has no effect"),
        ({"local": "fsdp", "tp": 1}, ""),
        ({}, ""),
    ],
    ids=str,
)
def test_a_way_of_ranks_without_ranks_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: dict[str, Any], told: str
) -> None:
    options = PeerOptions(tmp_path, device="cpu", **given)
    assert open_ranks(small_spec(), options) is None
    assert [told in r.message for r in caplog.records] == [True] * bool(told)
