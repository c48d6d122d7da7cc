"""Records that cannot be used: one is left out, counted and named, and many are an error.

Which ones are left out follows from the contents of a file alone, so every machine keeps the same
records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from swarmnet.errors import DataError
from swarmnet.plurals import counted

MOST = 0.1
"""Part of a file's records that may be bad; one always may."""
FIRST = 1000
"""After so many records of a file the part is looked at, and at its end."""
SHOWN = 5


class BadRecord(DataError):
    """A record that gives no document."""

    def __init__(self, where: str, reason: str, kind: str) -> None:
        """`where`: its file and line. `reason`: what follows that in a sentence. `kind`: what
        records are counted by."""
        super().__init__(f"[data] {where}{reason}")
        self.kind = kind


class BadRecords:
    """Those of one source."""

    def __init__(self, settle: Callable[[], None] = lambda: None) -> None:
        """`settle`: called before the bad ones of a file are counted; adds those that are known
        late, where records are looked at many at once."""
        self._settle = settle
        self.kinds: Counter[str] = Counter()
        self.num_records = 0
        """Of the files that were read to their ends."""
        self._first: list[str] = []
        self._path = Path()
        self._seen = 0
        self._found: list[str] = []
        self._kinds: Counter[str] = Counter()

    def begin(self, path: Path) -> None:
        """A file; what an earlier one that was not ended had is forgotten."""
        self._path = path
        self._seen = 0
        self._found = []
        self._kinds = Counter()

    def count(self) -> None:
        """A record of the file, good or bad. Raises `DataError` where too many were bad."""
        if self._seen == FIRST:
            self._check()
        self._seen += 1

    def add(self, error: BadRecord) -> None:
        """A record of the file is bad."""
        if len(self._found) < SHOWN:
            self._found.append(str(error))
        self._kinds[error.kind] += 1

    def end(self) -> None:
        """The file has been read. Raises `DataError` where too many records were bad."""
        self._check()
        self.kinds += self._kinds
        self.num_records += self._seen
        self._first += self._found[: SHOWN - len(self._first)]
        self.begin(Path())

    def _check(self) -> None:
        self._settle()
        bad = self._kinds.total()
        if bad > max(1, MOST * self._seen):
            raise DataError(
                f"[data] {self._path}: {bad:,} of {counted(self._seen, 'record', ',')} cannot be "
                f"used, the first: {self._found[0].removeprefix('[data] ')}"
            )

    @property
    def lines(self) -> tuple[str, ...]:
        """For people: how many, and the first of them."""
        bad = self.kinds.total()
        if not bad:
            return ()
        shown = "; ".join(text.removeprefix("[data] ") for text in self._first)
        more = "; ..." if bad > len(self._first) else ""
        return (
            f"[data] {bad:,} of {counted(self.num_records, 'record', ',')} left out, for they "
            f"cannot be used: {shown}{more}",
        )


def utf8_of(text: str, where: str) -> bytes:
    """Raises `BadRecord` where it has half of a character: JSON can say that, UTF-8 cannot."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        reason = f" has a lone surrogate ({text[error.start]!r}), which is no character"
        raise BadRecord(where, reason, "with a lone surrogate") from None
