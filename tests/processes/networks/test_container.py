"""A swarm in a container as docker may make one: another user, nothing to write but a volume,
hardly any shared memory, no IPv6; namespaces."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.processes.running import SWARMNET, Machine, tiny_run

pytestmark = [pytest.mark.processes, pytest.mark.long]
USER = "4242"
"""Nobody here has that number: there is no name for it, and no home."""
ENTER = """
set -e
folder=$1 base=$2 user=$3
shift 3
ip link set lo up
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
mount -t tmpfs -o size=1m tmpfs /dev/shm
mount --bind "$folder" "$folder"
case $base in /root/*)  # Python lies where only root looks
    mkdir -p "$folder/base"
    mount --bind "$base" "$folder/base"
    mount -t tmpfs -o mode=755 tmpfs /root
    mkdir -p "$base"
    mount --bind "$folder/base" "$base"
esac
mount -o remount,bind,ro /
exec setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs --bounding-set=-all \
    env -u USER -u LOGNAME HOME=/ XDG_CACHE_HOME="$folder/cache" SWARMNET_PORTABLE="$PORTABLE" "$@"
"""


@pytest.mark.parametrize("portable", ["", "1"])
def test_a_swarm_runs_as_any_user_with_little_else(running: Machine, portable: str) -> None:
    """On p2pd, and with py-libp2p as on ARM."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.fail("namespaces need Linux, root and util-linux: run this test as root")
    running.folder.chmod(0o1777)
    path = tiny_run(running.folder, rounds=5)
    base = str(Path(sys.base_prefix).resolve())
    inside = ("unshare", "--mount", "--net", "--ipc", "sh", "-c", ENTER, "sh")
    local = running.start(
        "local",
        *("local", "--plain", "--peers", "2", "--spec", str(path)),
        command=(*inside, str(running.folder), base, USER, *SWARMNET),
        environment={"PORTABLE": portable},
    )
    assert running.wait(local) == 0, local.describe()
    assert "samples lost" in local.output()
    owners = {p.stat().st_uid for p in (running.folder / "cache").rglob("*")}
    assert owners <= {int(USER)}
    told = any("py-libp2p carries" in line for line in local.errors())
    assert told == bool(portable)
