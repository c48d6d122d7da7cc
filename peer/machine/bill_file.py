"""`traffic.json` in a peer's state folder: what the machine's peer has sent and received."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from peer.machine.bill import Bill
from swarmnet.files import write_whole
from swarmnet.protocol.trouble import Trouble

log = logging.getLogger("swarmnet.peer")

BILL_FILE = "traffic.json"
MAX_FILE_BYTES = 64 << 10
SAVE_EVERY_S = 30.0


def read_bill(path: Path) -> Bill:
    """Nothing where nothing can be read."""
    try:
        with path.open("rb") as file:
            return Bill.from_json(json.loads(file.read(MAX_FILE_BYTES)))
    except FileNotFoundError:
        return Bill()
    except (OSError, ValueError, RecursionError) as e:
        log.warning("%s cannot be read (%s): the count of bytes begins anew", path, e)
        return Bill()


def date_now() -> str:
    """Such as 2026-11-29, local time."""
    return time.strftime("%Y-%m-%d")


@dataclass
class BillFile:
    """Keeps it up to date."""

    path: Path
    bill: Bill = field(default_factory=Bill)
    _before: tuple[int, int] = (0, 0)
    """Bytes of this process, sent and received, that are in it."""
    _saved_at: float = float("-inf")
    _is_saved: bool = True
    _trouble: Trouble = field(default_factory=Trouble)

    def read(self) -> None:
        """Goes on with what is in the file."""
        self.bill = read_bill(self.path)

    def count(self, date: str, sent: int, received: int) -> None:
        """Takes in what this process has sent and received since it began."""
        more = (sent - self._before[0], received - self._before[1])
        self._before = (sent, received)
        if any(more):
            self.bill.add(date, *more)
            self._is_saved = False

    def to_save(self, now: float) -> str:
        """What `write` is to write; empty where nothing is due. `now`: seconds, of a clock that
        never goes back."""
        if self._is_saved or now - self._saved_at < SAVE_EVERY_S:
            return ""
        return self.text()

    def text(self) -> str:
        """Of the file."""
        self._is_saved = True
        return json.dumps(self.bill.to_json()) + "\n"

    def write(self, text: str, now: float) -> None:
        """A full disk is no reason to stop. Blocks."""
        self._saved_at = now
        try:
            write_whole(self.path, text)
        except OSError as e:
            self._is_saved = False
            more = self._trouble.failed(now)
            if more is not None:
                log.warning("the count of bytes is not kept: %s: %s%s", self.path, e.strerror, more)
            return
        if self._trouble.is_over():
            log.warning("the count of bytes is kept again in %s", self.path)
