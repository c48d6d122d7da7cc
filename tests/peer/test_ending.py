"""A command that was stopped ends, whatever its threads are at."""

from __future__ import annotations

import subprocess
import sys

import pytest

STOPPED = """
import asyncio, atexit, os, signal, sys, time
from pathlib import Path
from peer import cli
from peer.loop import Stopped, run

ends, seconds = sys.argv[1:]

class Heap:  # what takes long to free
    def __del__(self):
        time.sleep(600)

heap = Heap()
atexit.register(lambda: print("tidied", flush=True))

def beside():
    time.sleep(float(seconds))
    print("written", flush=True)

async def work():
    asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGINT)
    try:
        await asyncio.to_thread(beside)
    finally:
        print("drained", await asyncio.to_thread(lambda: "in a thread"))

def command(arguments):
    try:
        run(work())
    except Stopped:
        print("stopped")  # buffered, as stdout is no terminal
    return int(ends)

cli.run_command = command
cli.main()
"""


@pytest.mark.parametrize(
    ("seconds", "printed"),
    [
        ("600", "drained in a thread\nstopped\n"),
        ("0.2", "drained in a thread\nstopped\nwritten\ntidied\n"),
    ],
)
@pytest.mark.parametrize("code", [0, 3])
def test_one_signal_ends_a_command_whose_threads_go_on(
    code: int, seconds: str, printed: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, str(code), seconds],
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [sorted(text.splitlines()) for text in (done.stdout, printed)]
    assert (done.returncode, lines[0], done.stderr) == (code, lines[1], "")
