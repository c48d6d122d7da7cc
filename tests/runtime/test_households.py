"""The key of a household in a file: made once, and said so."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnet.errors import UserError
from swarmnet.household import is_of
from swarmnet.identity import Identity
from swarmnet.protocol.sync_modes import AUTO, DELAYED, GOSSIP, LOCAL, ZERO
from swarmnet.runtime.compose import household_from, say_if_useless


def test_a_new_key_is_said_and_another_machine_takes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [Identity.load_or_create(tmp_path / f"{name}.key") for name in "ab"]
    found = [household_from(tmp_path / "house.key", key) for key in keys]
    (line,) = (record.getMessage() for record in caplog.records)
    assert "house.key; give that file to the other machines behind this uplink" in line
    assert len({h.key for h in found if h is not None}) == 1
    for household, key, other in zip(found, keys, reversed(keys), strict=True):
        assert household is not None
        assert is_of(household, key.peer_id)
        assert not is_of(household, other.peer_id)
    assert household_from(None, keys[0]) is None


@pytest.mark.parametrize("mode", [LOCAL, GOSSIP])
def test_a_mode_in_which_a_key_changes_nothing_is_told(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    say_if_useless(tmp_path / "house.key", mode)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(f"--household changes nothing in mode {mode}, ")


@pytest.mark.parametrize("mode", [ZERO, DELAYED, AUTO])
def test_nothing_is_told_where_a_key_is_of_use(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    say_if_useless(tmp_path / "house.key", mode)
    say_if_useless(None, LOCAL)
    assert not caplog.records


def test_what_is_no_key_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.key").write_bytes(b"\xff" * 300)
    with pytest.raises(UserError, match=r"x\.key is no Ed25519 key"):
        household_from(tmp_path / "x.key", Identity.load_or_create(tmp_path / "a.key"))
