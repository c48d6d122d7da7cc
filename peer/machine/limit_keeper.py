"""Keeps a peer to what its machine's owner allows: watches `limits.toml`, the clock, the machine's
load and the peer's memory, and tells transport, device and peer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from peer.machine.bill import counted, used_line, why_used_up
from peer.machine.bill_file import BILL_FILE, BillFile, date_now
from peer.machine.limits import read_limits, write_limits
from peer.machine.memory_cap import MemoryCap, tree_bytes
from peer.machine.metered import is_metered
from peer.machine.others_load import OthersLoad
from swarmnet.errors import UserError
from swarmnet.protocol.resource_limits import (
    MIN_UPLOAD_BYTES_PER_S,
    BusyWatch,
    OwnerLimits,
    told_totals,
    why_paused,
)
from swarmnet.runtime.state_dir import lock_stamp
from swarmnet.swarm.resource_limits import ResourceLimits

log = logging.getLogger("swarmnet.peer")

LOOK_EVERY_S = 1.0
MEASURE_EVERY_S = 2.0
"""Between looks at the machine's load; a look at all processes costs some milliseconds."""
ASK_METERED_EVERY_S = 30.0
"""Each time is a process."""


class CapsUpload(Protocol):
    """A transport."""

    def limit_upload(self, bytes_per_s: float | None) -> None: ...


class CapsShare(Protocol):
    """A device."""

    def limit_share(self, share: float | None) -> None: ...


def minute_of_day() -> int:
    """Local time."""
    now = time.localtime()
    return 60 * now.tm_hour + now.tm_min


def is_on_battery() -> bool:
    """This machine has a battery and takes its power from it, as far as is known."""
    battery = getattr(psutil, "sensors_battery", lambda: None)()
    return battery is not None and battery.power_plugged is False


@dataclass
class Keeper:
    """Applies the limits of one peer."""

    path: Path
    """Of `limits.toml`."""
    limited: ResourceLimits
    transport: CapsUpload
    device: CapsShare
    memory: MemoryCap
    stages: Callable[[], list[int]]
    """That the machine serves now."""
    minute: Callable[[], int] = minute_of_day
    measure_others: Callable[[], float] | None = None
    measure_memory: Callable[[], float] | None = None
    on_battery: Callable[[], bool] = is_on_battery
    on_metered: Callable[[], bool] = is_metered
    limits: OwnerLimits = field(default_factory=OwnerLimits)
    traffic: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Bytes that this process has sent and received since it began."""
    date: Callable[[], str] = date_now
    tell: Callable[[Mapping[str, int]], None] = lambda totals: None
    """Takes what others are told of a day's and a month's bytes, when that has changed."""

    def __post_init__(self) -> None:
        self._stamp: tuple[int, int] | None = None
        self._lock = lock_stamp(self.path.parent)
        """Of the folder in which the file was last seen."""
        self._watch = BusyWatch()
        self._battery = BusyWatch()  # a plug that is moved is no reason to leave
        self._is_metered = False
        self._asked_metered_at = float("-inf")
        self._told: dict[str, int] = {}
        self._measured_at = float("-inf")
        self._upload: float | None = None
        """What the transport was told."""
        self._bill = BillFile(self.path.with_name(BILL_FILE))

    def start(self) -> None:
        """Before the peer's life begins. Raises `UserError` where the file is bad, or no stage fits
        into the memory."""
        self._stamp = self._look()
        self._bill.read()
        self._take(read_limits(self.path))
        if self.memory.cap_bytes is not None:
            reasons = [self.memory.unfit(k) for k in range(len(self.memory.needs))]
            if all(reasons):
                raise UserError(min(reasons, key=len))
        self.limited.bound_memory(self._unfit, self._max_open_steps, self._room_bytes)
        self._decide()

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self.look_again(loop.time())
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._bill.count(self.date(), *self.traffic())
            self._bill.write(self._bill.text(), loop.time())

    async def look_again(self, now: float) -> None:
        """One look at everything. `now`: the loop's clock, seconds."""
        self._reread()
        await self._measure(now)
        self._decide()

    @property
    def line(self) -> str:
        """For people: what is limited, and whether it is paused."""
        paused = f"paused because {self.limited.why_paused}" if self.limited.why_paused else ""
        used = used_line(self.limits, self._bill.bill, self.date())
        return "; ".join(part for part in (self.limits.describe(), used, paused) if part)

    # ---- the file ---------------------------------------------------------------------------

    def _look(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino

    def _reread(self) -> None:
        stamp = self._look()
        if stamp is None and self._is_made_anew():
            self._write_again()
            stamp = self._look()
        elif stamp is not None:
            self._lock = lock_stamp(self.path.parent)
        if stamp == self._stamp or (stamp is None and not self.path.parent.exists()):
            return  # an owner whose folder is gone, or whose disk is, has changed nothing
        self._stamp = stamp
        try:
            limits = read_limits(self.path)
        except UserError as e:
            log.warning("%s; the limits stay as they were", e)
            return
        if limits != self.limits:
            self._take(limits)
            log.warning("limits: %s", limits.describe() or "none")

    def _is_made_anew(self) -> bool:
        """The folder was removed, and not the file alone: that was not the owner's word on what the
        peer may take."""
        return self.path.parent.exists() and lock_stamp(self.path.parent) != self._lock

    def _write_again(self) -> None:
        self._lock = lock_stamp(self.path.parent)
        if self.limits != OwnerLimits():
            try:
                write_limits(self.path, self.limits)
            except UserError as e:
                log.warning("%s; the limits stay as they were", e)
        self._stamp = self._look()

    def _take(self, limits: OwnerLimits) -> None:
        self.limits = limits
        self.device.limit_share(limits.max_device_share)
        self.memory.cap(limits.max_memory_bytes)
        self.limited.tell()  # there may be room for a stage now
        if not limits.pause_when_busy:
            self._watch.reset()

    # ---- the machine ------------------------------------------------------------------------

    async def _measure(self, now: float) -> None:
        if now - self._measured_at < MEASURE_EVERY_S:
            return
        self._measured_at = now
        is_unplugged = await asyncio.to_thread(self.on_battery)
        self._battery.observe(1.0 if is_unplugged else 0.0, now)
        if now - self._asked_metered_at >= ASK_METERED_EVERY_S and self.limits.pause_on_metered:
            self._asked_metered_at = now
            self._is_metered = await asyncio.to_thread(self.on_metered)
        self._bill.count(self.date(), *self.traffic())
        self._tell_used()
        if text := self._bill.to_save(now):
            await asyncio.to_thread(self._bill.write, text, now)
        if self.limits.pause_when_busy:
            if self.measure_others is None:
                self.measure_others = (await asyncio.to_thread(OthersLoad)).measure
                return
            self._watch.observe(await asyncio.to_thread(self.measure_others), now)
        if self.memory.cap_bytes is None:
            self.limited.fill(False)
        else:
            measure = self.measure_memory or _own_bytes
            self.limited.fill(self.memory.is_full(await asyncio.to_thread(measure)))

    def _tell_used(self) -> None:
        totals = told_totals(counted(self.limits, self._bill.bill, self.date()))
        if totals != self._told:
            self._told = totals
            self.tell(totals)

    # ---- deciding ---------------------------------------------------------------------------

    def _decide(self) -> None:
        is_busy, is_unplugged = self._watch.is_busy, self._battery.is_busy
        reason = why_paused(self.limits, self.minute(), is_busy, is_unplugged, self._is_metered)
        used_up = why_used_up(self.limits, self._bill.bill, self.date())
        self._limit_upload(bool(used_up))
        reason = reason or used_up or self._why_unfit()
        if reason == self.limited.why_paused:
            return
        if reason:
            log.warning("paused because %s", reason)
        else:
            log.warning("going on: nothing stands against it any more")
        self.limited.pause(reason)

    def _limit_upload(self, is_used_up: bool) -> None:
        """Where a day or a month is used up, a peer that has handed over only gossips: what it
        relays, or gives of what it keeps, waits too."""
        wanted = self.limits.max_upload_bytes_per_s
        if is_used_up and not self.stages():
            wanted = MIN_UPLOAD_BYTES_PER_S
        if wanted != self._upload:
            self._upload = wanted
            self.transport.limit_upload(wanted)

    def _unfit(self, stage: int) -> str:
        return self.memory.unfit(stage, self._beside(stage))

    def _max_open_steps(self, stage: int) -> int | None:
        return self.memory.max_open_steps(stage, self._beside(stage), self.limited.text_bytes)

    def _room_bytes(self, stage: int) -> float:
        return self.memory.text_room_bytes([stage, *self._beside(stage)])

    def _beside(self, stage: int) -> list[int]:
        return [k for k in self.stages() if k != stage]

    def _why_unfit(self) -> str:
        """The memory that may be taken became too little for what is served, or for any stage."""
        served = self.stages()
        if served:
            return self.memory.unfit(served[0], served[1:])
        reasons = [self.memory.unfit(k) for k in range(len(self.memory.needs))]
        return reasons[0] if reasons and all(reasons) else ""


def _own_bytes() -> float:
    return tree_bytes(psutil.Process())
