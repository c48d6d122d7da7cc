"""Whether NetworkManager says that this machine's network is metered: a phone's, say."""

from __future__ import annotations

import shutil
import subprocess

SERVICE = "org.freedesktop.NetworkManager"
COMMAND = (
    *("busctl", "--system", "--auto-start=no", "--timeout=2", "get-property"),
    *(SERVICE, "/org/freedesktop/NetworkManager", SERVICE, "Metered"),
)
ANSWER_S = 3.0
METERED = ("u 1", "u 3")
"""`NM_METERED_YES` and `NM_METERED_GUESS_YES`, as busctl writes them (NetworkManager's D-Bus API,
`NMMetered`)."""


def is_metered() -> bool:
    """As far as is known: False where there is no NetworkManager, or no busctl (systemd's) to ask
    it. Blocks for a moment."""
    if shutil.which(COMMAND[0]) is None:
        return False
    try:
        asked = subprocess.run(
            COMMAND, capture_output=True, text=True, errors="replace", timeout=ANSWER_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return asked.stdout.strip() in METERED
