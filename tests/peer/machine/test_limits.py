"""`limits.toml`, `swarmnet limits`, and who applies them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from peer.cli import run_command
from peer.machine.bill import Bill, Used
from peer.machine.bill_file import BILL_FILE, BillFile, date_now, read_bill
from peer.machine.limit_keeper import (
    ASK_METERED_EVERY_S,
    MEASURE_EVERY_S,
    Keeper,
    is_on_battery,
)
from peer.machine.limits import (
    LIMITS_FILE,
    change_limits,
    limits_text,
    parse_limits,
    read_limits,
    the_state_dir,
)
from peer.machine.memory_cap import MemoryCap, StageNeed, stage_needs
from peer.machine.metered import is_metered
from peer.machine.others_load import OthersLoad, load_of_others
from peer.options import LimitOptions
from swarmnet.errors import UserError
from swarmnet.protocol.resource_limits import (
    BUSY_AFTER_S,
    MIN_UPLOAD_BYTES_PER_S,
    QUIET_AFTER_S,
    OwnerLimits,
    told_allowances,
)
from swarmnet.runtime.options import default_spec_path
from swarmnet.runtime.state_dir import claimed_state_dir
from swarmnet.spec import load_spec
from swarmnet.swarm.resource_limits import ResourceLimits

FULL = """
max_upload = "10Mbit"
max_memory = "4GB"
max_device_share = "50%"
hours = ["22:00-07:00", "12:00-13:00"]
pause_when_busy = true
paused = false
"""


def test_a_file_is_read_and_written_as_the_same() -> None:
    limits = parse_limits(FULL.encode(), "here")
    assert limits == OwnerLimits(1.25e6, 4e9, 0.5, ((1320, 420), (720, 780)), True, False)
    assert parse_limits(limits_text(limits).encode(), "here") == limits
    nothing = OwnerLimits()
    assert parse_limits(limits_text(nothing).encode(), "here") == nothing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_upload = ", "here is not TOML"),
        ("\xff", "here is not UTF-8 text"),
        ("max_uplaod = '1Mbit'", "here: unknown key 'max_uplaod'; did you mean max_upload?"),
        ("max_upload = 5", "here: max_upload: it is written in quotes"),
        ("max_upload = '1bit'", "here: max_upload: at least"),
        ("max_device_share = '0%'", "here: max_device_share: from 1% to 100%"),
        ("hours = '22:00-07:00'", "here: hours: it is a list"),
        ("hours = ['22:00']", "here: hours: '22:00': hours are written"),
        ("paused = 1", "here: paused: it is true or false"),
    ],
)
def test_a_bad_file_is_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_limits(text.encode("latin-1"), "here")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_the_command_shows_changes_and_takes_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def limits(line: str) -> str:
        assert run_command(["limits", "--state-dir", str(tmp_path), *line.split()]) == 0
        return capsys.readouterr().out.strip().removeprefix(f"{tmp_path}: ")

    assert limits("") == "no limits"
    assert not (tmp_path / LIMITS_FILE).exists()
    assert limits("--max-upload 10Mbit --hours 22:00-07:00") == ("upload 10Mbit; hours 22:00-07:00")
    assert limits("--max-device-share 50% --pause").endswith(
        "device 50% of the time; hours 22:00-07:00; paused"
    )
    assert read_limits(tmp_path / LIMITS_FILE).paused
    assert limits("--max-upload none --hours none --resume --pause-when-busy") == (
        "device 50% of the time; pauses when the machine is in use"
    )
    assert limits("") == "device 50% of the time; pauses when the machine is in use"
    assert [p.name for p in tmp_path.iterdir()] == [LIMITS_FILE]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max-upload fast", "--max-upload: 'fast': a rate is written"),
        ("--max-device-share 200%", "max_device_share: from 1% to 100%"),
        ("--hours 7", "--hours: '7': hours are written"),
    ],
)
def test_wrong_words_change_nothing(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["limits", "--state-dir", str(tmp_path), *line.split()]) == 1
    assert capsys.readouterr().err.startswith(f"swarmnet: {message}")
    assert not list(tmp_path.iterdir())


def test_which_peer_is_meant(tmp_path: Path) -> None:
    one, two = tmp_path / "peer-1", tmp_path / "peer-2"
    with pytest.raises(UserError, match="no peer has run here"):
        the_state_dir(None, [one, two])
    one.mkdir()
    assert the_state_dir(None, [one, two]) == one
    two.mkdir()
    with pytest.raises(UserError, match="several peers"):
        the_state_dir(None, [one, two])
    assert the_state_dir(two, [one, two]) == two
    with pytest.raises(UserError, match="no peer's state folder"):
        the_state_dir(tmp_path / "none", [])


def test_options_of_a_start_stay(tmp_path: Path) -> None:
    change_limits(tmp_path, LimitOptions(max_memory="4GB", pause_when_busy=True))
    assert change_limits(tmp_path, LimitOptions()) == OwnerLimits(
        max_memory_bytes=4e9, pause_when_busy=True
    )


@dataclass
class Bench:
    """A keeper with everything that it reads and tells in the test's hands."""

    folder: Path
    limited: ResourceLimits = field(default_factory=ResourceLimits)
    upload: list[float | None] = field(default_factory=list)
    share: float | None = None
    stages: list[int] = field(default_factory=lambda: [0])
    minute: int = 0
    others: float = 0.0
    used: float = 0.0
    now: float = 0.0

    def __post_init__(self) -> None:
        needs = [StageNeed(100.0, 10.0), StageNeed(50.0, None)]
        self.keeper = Keeper(
            self.folder / LIMITS_FILE,
            self.limited,
            self,
            self,
            MemoryCap(needs, 1000.0),
            lambda: self.stages,
            lambda: self.minute,
            lambda: self.others,
            lambda: self.used,
            on_battery=lambda: False,
            on_metered=lambda: False,
        )

    def limit_upload(self, bytes_per_s: float | None) -> None:
        self.upload.append(bytes_per_s)

    def limit_share(self, share: float | None) -> None:
        self.share = share

    def write(self, text: str) -> None:
        beside = self.folder / "new"
        beside.write_text(text)
        os.utime(beside, ns=(0, int(1e9 * (self.now + 1))))
        beside.replace(self.folder / LIMITS_FILE)

    async def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / MEASURE_EVERY_S) + 1):
            self.now += MEASURE_EVERY_S
            await self.keeper.look_again(self.now)


def test_a_changed_file_is_applied_and_a_bad_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        bench = Bench(tmp_path)
        bench.keeper.start()
        assert (bench.upload, bench.share, bench.keeper.line) == ([], None, "")
        bench.write(FULL)
        bench.minute = 23 * 60
        await bench.pass_time(2)
        assert (bench.upload, bench.share) == ([1.25e6], 0.5)
        assert bench.keeper.line.startswith("upload 10Mbit; memory 4GB; device 50%")
        bench.write("max_upload = 'a lot'")
        await bench.pass_time(20)
        assert (bench.upload, bench.share) == ([1.25e6], 0.5)
        complaints = [r.message for r in caplog.records if "a rate is written" in r.message]
        assert len(complaints) == 1, "one line, not one a look"
        assert complaints[0].endswith("the limits stay as they were")
        (tmp_path / LIMITS_FILE).unlink()
        await bench.pass_time(2)
        assert (bench.upload, bench.share, bench.keeper.line) == ([1.25e6, None], None, "")

    asyncio.run(main())


def test_reasons_to_pause_come_and_go(tmp_path: Path) -> None:
    async def main() -> None:
        bench = Bench(tmp_path, minute=12 * 60)
        bench.write('hours = ["22:00-07:00"]\npause_when_busy = true')
        bench.keeper.start()
        assert bench.limited.why_paused == "it is outside its hours 22:00-07:00"
        assert "paused because it is outside" in bench.keeper.line
        bench.minute = 22 * 60
        await bench.pass_time(0)
        assert bench.limited.why_paused == ""
        bench.others = 0.8
        await bench.pass_time(BUSY_AFTER_S + 2)
        assert bench.limited.why_paused == "the machine is in use"
        bench.others = 0.0
        await bench.pass_time(QUIET_AFTER_S - 10)
        assert bench.limited.why_paused
        await bench.pass_time(20)
        assert bench.limited.why_paused == ""
        bench.write("paused = true")
        await bench.pass_time(0)
        assert bench.limited.why_paused == "its owner paused it"
        assert bench.limited.changed.is_set()

    asyncio.run(main())


def test_memory_bounds_what_comes_in_and_which_stage(tmp_path: Path) -> None:
    async def main() -> None:
        bench = Bench(tmp_path)
        bench.write("max_memory = '1135B'")
        bench.keeper.start()
        assert bench.limited.max_open_steps(0) == 3
        assert bench.limited.has_room(0, 2)
        assert not bench.limited.has_room(0, 3)
        bench.used = 1135.0
        await bench.pass_time(2)
        assert bench.limited.has_room(0, 0)
        assert not bench.limited.has_room(0, 1)
        bench.used = 1134.0
        await bench.pass_time(2)
        assert bench.limited.has_room(0, 1)
        bench.write("max_memory = '1060B'")  # too little for this stage, enough for the other
        await bench.pass_time(2)
        assert bench.limited.why_paused.startswith("stage 0 takes 0 MiB with one microbatch")
        bench.stages = []
        await bench.pass_time(2)
        assert bench.limited.why_paused == ""
        assert bench.limited.unfit(0)
        assert not bench.limited.unfit(1)
        bench.stages = [1]
        assert bench.limited.unfit(1) == ""
        bench.write("max_memory = '1110B'")
        await bench.pass_time(2)
        assert "stage 0 beside 1 more takes" in bench.limited.unfit(0)
        bench.stages = []
        await bench.pass_time(2)
        assert bench.limited.unfit(0) == ""
        bench.write("max_memory = '10B'")
        await bench.pass_time(2)
        assert bench.limited.why_paused

    asyncio.run(main())


def test_a_machine_on_which_no_stage_fits_is_refused_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        bench = Bench(tmp_path)
        bench.write("max_memory = '1020B'")
        with pytest.raises(UserError, match=r"stage 0 takes .* --max-memory.* allows"):
            bench.keeper.start()

    asyncio.run(main())


def test_the_needs_of_a_real_run() -> None:
    spec = load_spec(default_spec_path())
    needs = stage_needs(spec)
    assert len(needs) == spec.pipeline.num_stages
    assert all(need.state > 0 and need.microbatch for need in needs)
    cap = MemoryCap(needs, 0.0, needs[0].state + 3.5 * (needs[0].microbatch or 0))
    assert cap.max_open_steps(0) == 3
    assert cap.max_open_steps(0, text_bytes=needs[0].microbatch or 0) == 2
    assert cap.text_room_bytes([0]) == 0.0
    cap.cap_bytes = needs[0].state + 6.0 * (needs[0].microbatch or 0)
    assert cap.text_room_bytes([0]) == 2.0 * (needs[0].microbatch or 0)
    assert MemoryCap(needs, 0.0).text_room_bytes([0]) == float("inf")


def test_what_others_use_is_the_machines_load_without_ours() -> None:
    assert load_of_others(6.0, 2.0, 2.0, 4) == pytest.approx(0.5)
    assert load_of_others(1.0, 2.0, 2.0, 4) == 0.0
    assert load_of_others(1.0, 0.0, 0.0, 4) == 0.0
    assert 0.0 <= OthersLoad().measure() <= 1.0


def test_limits_outlast_their_folder_but_not_their_file(tmp_path: Path) -> None:
    async def main() -> None:
        folder = tmp_path / "state"
        with claimed_state_dir(folder):
            bench = Bench(folder)
            bench.keeper.start()
            bench.write(FULL)
            await bench.pass_time(2)
            shutil.rmtree(folder)
            await bench.pass_time(4)
            assert bench.upload == [1.25e6], "nobody took the limits away"
            with claimed_state_dir(folder):  # as the peer does
                await bench.pass_time(2)
                assert bench.upload == [1.25e6]
                assert read_limits(folder / LIMITS_FILE) == bench.keeper.limits
                (folder / LIMITS_FILE).unlink()
                await bench.pass_time(2)
                assert bench.upload == [1.25e6, None], "that was the owner"

    asyncio.run(main())


def test_a_month_that_is_used_up_pauses_until_the_next_one_over_restarts(tmp_path: Path) -> None:
    sent = [0, 0]

    async def main(date: str) -> Bench:
        bench = Bench(tmp_path)
        bench.keeper.traffic = lambda: (sent[0], sent[1])
        bench.keeper.date = lambda: date
        bench.keeper.start()
        bench.write('max_upload_per_month = "300GB"\nmax_download_per_day = "20GB"\n')
        await bench.pass_time(2)
        return bench

    async def life() -> None:
        bench = await main("2026-11-28")
        assert bench.limited.why_paused == ""
        sent[0] = 200 * 10**9
        await bench.pass_time(60)
        assert bench.keeper.line == (
            "upload a month 300GB; download a day 20GB; 200GB of 300GB sent this month; "
            "0B of 20GB received today"
        )
        task = asyncio.ensure_future(bench.keeper.run())
        await asyncio.sleep(0)
        sent[0] = 240 * 10**9
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        sent[0] = 60 * 10**9  # another process
        bench = await main("2026-11-29")
        assert bench.limited.why_paused == ("it has sent this month what its owner allows, 300GB")
        assert bench.upload == [], "it hands over first"
        bench.stages = []
        await bench.pass_time(2)
        assert bench.upload == [MIN_UPLOAD_BYTES_PER_S], "nothing is relayed at full speed"
        bench.keeper.date = lambda: "2026-12-01"
        await bench.pass_time(2)
        assert bench.limited.why_paused == ""
        assert bench.upload == [MIN_UPLOAD_BYTES_PER_S, None]
        sent[1] = 20 * 10**9
        await bench.pass_time(2)
        assert "received today" in bench.limited.why_paused
        bench.write("")
        await bench.pass_time(2)
        assert bench.limited.why_paused == ""

    asyncio.run(life())


def test_a_count_that_cannot_be_read_or_kept_is_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gone" / BILL_FILE
    file = BillFile(path)
    for now in (0.0, 100.0, 200.0):
        file.count("2026-11-29", int(now) + 1, 0)
        file.write(file.to_save(now), now)
    path.parent.mkdir()
    file.count("2026-11-29", 500, 0)
    file.write(file.to_save(300.0), 300.0)
    assert file.to_save(400.0) == "", "nothing new"
    assert read_bill(path).today("2026-11-29") == Used(500, 0)
    path.write_text("{")
    assert read_bill(path) == Bill()
    said = [r.getMessage() for r in caplog.records]
    assert [line.split(":")[0] for line in said[:2]] == [
        "the count of bytes is not kept",
        f"the count of bytes is kept again in {path}",
    ]
    assert "begins anew" in said[2]
    assert len(said) == 3


def test_the_command_shows_what_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bill = Bill()
    bill.add(date_now(), 120 * 10**9, 0)
    (tmp_path / BILL_FILE).write_text(json.dumps(bill.to_json()))
    words = ["limits", "--state-dir", str(tmp_path), "--max-upload-per-month", "300GB"]
    assert run_command(words) == 0
    shown = f"{tmp_path}: upload a month 300GB; 120GB of 300GB sent this month\n"
    assert capsys.readouterr().out == shown
    assert read_limits(tmp_path / LIMITS_FILE).max_upload_per_month_bytes == 300e9
    assert run_command([*words[:4], "lots"]) == 1
    assert "--max-upload-per-month: 'lots': an amount is written" in capsys.readouterr().err
    assert run_command([*words[:4], "none"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: no limits\n"


def test_a_laptop_rests_on_its_battery_unless_its_owner_says_otherwise(tmp_path: Path) -> None:
    async def main() -> None:
        bench, unplugged = Bench(tmp_path), [True]
        bench.keeper.on_battery = lambda: unplugged[0]
        bench.keeper.start()
        await bench.pass_time(BUSY_AFTER_S - MEASURE_EVERY_S)
        assert bench.limited.why_paused == "", "somebody moves the plug"
        await bench.pass_time(2 * MEASURE_EVERY_S)
        assert bench.limited.why_paused == "the machine runs on battery"
        bench.write("pause_on_battery = false")
        await bench.pass_time(2)
        assert bench.limited.why_paused == ""
        assert bench.keeper.line == "works on battery too"
        bench.write("")
        await bench.pass_time(2)
        assert bench.limited.why_paused == "the machine runs on battery"
        unplugged[0] = False
        await bench.pass_time(QUIET_AFTER_S + 2 * MEASURE_EVERY_S)
        assert bench.limited.why_paused == ""

    asyncio.run(main())


@pytest.mark.parametrize(
    ("battery", "expected"),
    [
        (None, False),
        (SimpleNamespace(power_plugged=True), False),
        (SimpleNamespace(power_plugged=None), False),
        (SimpleNamespace(power_plugged=False), True),
    ],
)
def test_what_the_system_says_of_a_battery(
    battery: object, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.sensors_battery", lambda: battery, raising=False)
    assert is_on_battery() is expected
    monkeypatch.delattr("psutil.sensors_battery")
    assert is_on_battery() is False


def test_a_peer_rests_on_a_metered_network_unless_its_owner_says_otherwise(tmp_path: Path) -> None:
    async def main() -> None:
        bench, metered, asked = Bench(tmp_path), [True], []

        def on_metered() -> bool:
            asked.append(bench.now)
            return metered[0]

        bench.keeper.on_metered = on_metered
        bench.keeper.start()
        await bench.pass_time(0)
        assert bench.limited.why_paused == "its network is metered"
        bench.write("pause_on_metered = false")
        await bench.pass_time(2 * ASK_METERED_EVERY_S)
        assert bench.limited.why_paused == ""
        assert bench.keeper.line == "works on metered networks too"
        assert len(asked) == 1, "it is of no interest"
        bench.write("")
        metered[0] = False
        await bench.pass_time(4 * ASK_METERED_EVERY_S)
        assert bench.limited.why_paused == ""
        assert 4 <= len(asked) <= 6, "not at each look"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("echo u 0", False),
        ("echo u 1", True),
        ("echo u 2", False),
        ("echo u 3", True),
        ("echo u 4", False),
        ("echo s metered", False),
        ("echo 'Failed to get property: no such service' >&2; exit 1", False),
        ("printf '\\377'", False),
    ],
)
def test_what_network_manager_says_of_the_network(
    answer: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "busctl"
    asked.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\n{answer}\n')
    asked.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert is_metered() is expected
    words = (tmp_path / "words").read_text()
    assert "--auto-start=no" in words, "looking at it must not start it"
    assert words.endswith("org.freedesktop.NetworkManager Metered\n")


def test_where_nobody_can_be_asked_no_network_is_metered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not is_metered()
    (tmp_path / "busctl").write_text("no program")
    (tmp_path / "busctl").chmod(0o755)
    assert not is_metered()


def test_others_are_told_what_is_left_of_a_month(tmp_path: Path) -> None:
    async def main() -> None:
        bench, told, moved = Bench(tmp_path), [], [0, 0]
        bench.keeper.tell = told.append
        bench.keeper.traffic = lambda: (moved[0], moved[1])
        bench.keeper.date = lambda: "2026-11-29"
        bench.keeper.start()
        await bench.pass_time(10)
        assert told == [], "nothing is bounded"
        bench.write('max_upload_per_month = "300GB"\nmax_download_per_day = "2GB"')
        moved[:] = [120_000_000_000, 500_000_000]
        await bench.pass_time(10)
        assert len(told) == 1, "it has not changed since"
        assert told_allowances(told[-1]) == (
            ("sent this month", 120_000_000_000, 300_000_000_000),
            ("received today", 500_000_000, 2_000_000_000),
        )
        bench.write("")
        await bench.pass_time(10)
        assert told_allowances(told[-1]) == ()

    asyncio.run(main())
