"""A process that parses: what it breaks is itself, and who asked gets one line."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from swarmnet.errors import DataError, SpecError
from swarmnet.parsing import process
from swarmnet.parsing.frames import KEPT_SETS, GivenFiles, Kept, given
from swarmnet.parsing.process import ParsingProcess
from tests.parsing import functions

FILES = GivenFiles({"a.json": b"{}", "b": b"x"})


@pytest.fixture(scope="module")
def child() -> Iterator[ParsingProcess]:
    process = ParsingProcess()
    yield process
    process.close()


def test_values_go_there_and_come_back(child: ParsingProcess) -> None:
    values = ["half \ud83d", b"\x00\xff", 1 << 63, -1.5, None, True, {"a": [1, "b"]}]
    assert child.call(functions.echo, "it", 30.0, FILES, *values) == [["a.json", "b"], values]
    large = b"y" * (8 << 20)
    _, (back,) = child.call(functions.echo, "it", 30.0, FILES, large)
    assert back == large, "more than a pipe holds"


def test_nothing_heavy_is_imported(child: ParsingProcess) -> None:
    """Each would cost a second, or memory that a file is to have."""
    assert child.call(functions.heavy, "it", 30.0, FILES) == []


def test_files_are_sent_once_and_what_is_made_of_them_is_kept(child: ParsingProcess) -> None:
    first = child.call(functions.made, "it", 30.0, FILES)
    assert child.call(functions.made, "it", 30.0, given(dict(FILES))) == first, "by their contents"
    others = [GivenFiles({"a.json": bytes([k])}) for k in range(KEPT_SETS)]
    counts = [child.call(functions.made, "it", 30.0, files) for files in others]
    assert counts == [first + k + 1 for k in range(KEPT_SETS)]
    assert child.call(functions.made, "it", 30.0, FILES) == counts[-1] + 1, "it was forgotten"


def test_both_sides_forget_the_same() -> None:
    ours, theirs = Kept(), Kept()
    sets = [GivenFiles({"a": bytes([k])}) for k in range(KEPT_SETS + 2)]
    for k in (0, 1, 0, 2, 3, 4, 0, 5, 1, 0, 2):
        files = sets[k]
        is_known = files.key in ours
        ours.use(files)
        assert (theirs.use(None, files.key) is not None) == is_known
        theirs.use(files)
        assert ours.num_bytes == theirs.num_bytes <= KEPT_SETS


def test_what_is_refused_is_raised_here(child: ParsingProcess) -> None:
    before = child.call(functions.pid, "it", 30.0, FILES)
    with pytest.raises(SpecError, match=r"^a spec that is wrong$"):
        child.call(functions.refuse, "it", 30.0, FILES, "spec")
    with pytest.raises(DataError, match=r"^the file is wrong$"):
        child.call(functions.refuse, "the file", 30.0, FILES, "refusal")
    assert child.call(functions.pid, "it", 30.0, FILES) == before, "which ends no process"


@pytest.mark.parametrize(
    ("kind", "seconds", "line"),
    [
        ("crash", 30.0, r"ends the process that reads it \(SIGSEGV\)"),
        ("abort", 30.0, r"ends the process that reads it \(SIGABRT\)"),
        ("exit", 30.0, r"ends the process that reads it \(exit code 3\)"),
        ("panic", 30.0, r"cannot be used \(PanicException: index out of bounds\)"),
        ("allocate", 30.0, r"needs more than [\d,]+ MiB of memory to be read"),
        ("answer", 30.0, r"cannot be used \(it makes too much of its input\)"),
        ("object", 30.0, r"cannot be used \(TypeError"),
        ("sleep", 0.2, "is not read after 0 s"),
        ("interpreter", 0.2, "is not read after 0 s"),
    ],
)
def test_harm_is_one_line(
    child: ParsingProcess,
    kind: str,
    seconds: float,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "SLACK_S", 0.2)
    with pytest.raises(DataError, match=rf"^the file {line}.*: it is broken, or ") as raised:
        child.call(functions.harm, "the file", seconds, FILES, kind)
    assert str(raised.value).isprintable()
    assert child.pid is None
    assert child.call(functions.echo, "it", 30.0, FILES)[0] == ["a.json", "b"], (
        "another one goes on"
    )


def test_a_process_that_stands_still_is_waited_for() -> None:
    """As this one may, with all of a machine. Its file is not to blame."""
    child, longest_s = ParsingProcess(), 0.2
    pid = child.call(functions.pid, "it", 30.0, FILES)

    def go_on() -> None:
        stopped = psutil.Process(pid)
        while stopped.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        time.sleep(2 * longest_s)
        stopped.resume()

    waking = threading.Thread(target=go_on)
    waking.start()
    assert child.call(functions.harm, "the file", longest_s, FILES, "stand still") is None
    waking.join()
    assert child.pid == pid
    child.close()


def test_what_a_library_prints_is_no_answer(child: ParsingProcess) -> None:
    assert child.call(functions.harm, "it", 30.0, FILES, "print") == "printed"


def test_a_child_that_was_killed_is_followed_by_another(child: ParsingProcess) -> None:
    pid = child.call(functions.pid, "it", 30.0, FILES)
    psutil.Process(pid).kill()
    psutil.wait_procs([psutil.Process(pid)], timeout=10) if psutil.pid_exists(pid) else None
    assert child.call(functions.pid, "it", 30.0, FILES) != pid


def test_threads_wait_for_each_other(child: ParsingProcess) -> None:
    found = list[int]()

    def ask(k: int) -> None:
        found.append(child.call(functions.echo, "it", 30.0, FILES, k)[1][0])

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(8))


def test_it_ends_when_nobody_asks() -> None:
    process = ParsingProcess(idle_s=0.05)
    pid = process.call(functions.pid, "it", 30.0, FILES)
    until = time.monotonic() + 30
    while process.pid is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert process.pid is None
    assert not psutil.pid_exists(pid)
    assert process.call(functions.pid, "it", 30.0, FILES) != pid
    process.close()
    process.close()


def test_no_descriptors_are_left(child: ParsingProcess) -> None:
    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    child.close()
    before = count()
    for _ in range(2):
        with pytest.raises(DataError):
            child.call(functions.harm, "the file", 30.0, FILES, "exit")
    assert count() == before
