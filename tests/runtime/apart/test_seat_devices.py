"""Which devices each seat of a machine computes on; seats in processes of their own are taken, or
refused in one line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnet.errors import SpecError, UsageError, UserError
from swarmnet.runtime.apart.seat import ApartSeat, open_seats
from swarmnet.runtime.apart.seat_devices import (
    num_sharing,
    seat_devices,
    share_out,
    threads_each,
)
from swarmnet.runtime.options import PeerOptions
from tests.training.specs import small_spec


def cards(monkeypatch: pytest.MonkeyPatch, num: int, kind: str = "cuda") -> None:
    """So many, of which nothing but the number is asked."""
    accelerators = "swarmnet.training.accelerators"
    monkeypatch.setattr(f"{accelerators}.kind", lambda: kind)
    monkeypatch.setattr(f"{accelerators}.num_devices", lambda: num)


def options(folder: Path, **given: Any) -> PeerOptions:
    return PeerOptions(folder, spec=folder, **given)


@pytest.mark.parametrize(
    ("num_cards", "kind", "given", "expected"),
    [
        (0, "cpu", {"stages": "1", "tp": 2}, None),
        (0, "cpu", {"stages": "2"}, None),
        (0, "cpu", {"stages": "auto"}, None),
        (0, "cpu", {"stages": "2", "tp": 2}, [("cpu", "cpu")] * 2),
        (0, "cpu", {"stages": "2", "cp": 2}, [("cpu", "cpu")] * 2),
        (0, "cpu", {"stages": "2", "tp": 2, "local": "fsdp"}, [("cpu", "cpu")] * 2),
        (1, "cuda", {"stages": "2"}, None),
        (2, "cuda", {"stages": "2"}, [("cuda:0",), ("cuda:1",)]),
        (2, "cuda", {"stages": "2", "device": "cpu"}, None),
        (2, "cuda", {"stages": "2", "device": "cpu", "tp": 2}, [("cpu", "cpu")] * 2),
        (2, "cuda", {"stages": "3"}, [("cuda:0",), ("cuda:1",), ("cuda:0",)]),
        (4, "cuda", {"stages": "2"}, [("cuda:0",), ("cuda:1",)]),
        (4, "cuda", {"stages": "2", "tp": 2}, [("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")]),
        (4, "xpu", {"stages": "2"}, None),
    ],
)
def test_each_seat_has_its_devices(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_cards: int,
    kind: str,
    given: dict[str, Any],
    expected: Any,
) -> None:
    cards(monkeypatch, num_cards, kind)
    spec = small_spec(pipeline={"num_stages": 4})
    assert seat_devices(spec, options(tmp_path, **given)) == expected


def test_what_cannot_be_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_spec(pipeline={"num_stages": 4})
    cards(monkeypatch, 3)
    with pytest.raises(UserError, match="takes 4 cards, and this machine has 3: take fewer"):
        seat_devices(spec, options(tmp_path, stages="2", tp=2))
    with pytest.raises(UserError, match="takes 4 cards, and this machine has 3: take fewer"):
        open_seats(spec, options(tmp_path, stages="2", cp=2))
    cards(monkeypatch, 1)
    with pytest.raises(UserError, match=r"takes 4 cards, and this machine has 1: .* --device cpu"):
        seat_devices(spec, options(tmp_path, stages="2", tp=2))
    cards(monkeypatch, 3)
    with pytest.raises(SpecError, match="possible: 1, 2, 4"):
        seat_devices(spec, options(tmp_path, stages="2", tp=3))
    with pytest.raises(UserError, match="has 0 such devices"):
        seat_devices(spec, options(tmp_path, stages="2", device="xpu"))
    for given in ({"optimizer_memory": "device"}, {"weights_memory": "disk"}):
        with pytest.raises(UsageError, match="--stages 1"):
            open_seats(spec, options(tmp_path, stages="2", **given))
    assert open_seats(spec, options(tmp_path, stages="1", optimizer_memory="device")) == []


def test_memory_and_threads_are_shared_among_seats_of_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    given = options(tmp_path)
    three = share_out(2, 3, 1)
    assert [num_sharing(three, seat) for seat in range(3)] == [2, 1, 2]
    assert threads_each(given, three) == 0
    on_cpus = [("cpu", "cpu")] * 2
    assert [num_sharing(on_cpus, seat) for seat in range(2)] == [2, 2]
    assert threads_each(given, on_cpus) == 3
    assert threads_each(options(tmp_path, threads=2), on_cpus) == 2
    assert threads_each(given, [("cpu",)] * 24) == 1


def test_a_seat_asks_no_device_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a device spoils the process that has asked anything of it."""
    cards(monkeypatch, 2)
    asked = SimpleNamespace(names=list[str]())
    for name in ("free_bytes", "computes_in", "has_pinned_memory", "has_streams", "wait_for"):
        monkeypatch.setattr(
            f"swarmnet.training.accelerators.{name}", lambda *_, n=name: asked.names.append(n)
        )
    spec = small_spec(pipeline={"num_stages": 2})
    seats = open_seats(spec, options(tmp_path, stages="2"))
    assert [seat.is_on_cpu for seat in seats] == [False, False]
    assert all(isinstance(seat, ApartSeat) for seat in seats)
    assert asked.names == []
