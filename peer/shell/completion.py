"""`swarmnet completion`: a shell asks the program itself what may come next, through the library
that parses its options, so there is no second list of them."""

from __future__ import annotations

import os
from typing import Any

from typer.completion import completion_init, get_completion_script

PROGRAM = "swarmnet"
VARIABLE = "_SWARMNET_COMPLETE"
"""Of the environment, in which the scripts ask."""


def script(shell: str) -> str:
    """What makes a shell (`bash`, `zsh` or `fish`) complete commands and options."""
    return get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell).strip()


def is_asked() -> bool:
    """Whether a shell's script has started this process."""
    return VARIABLE in os.environ


def answer(command: Any) -> None:
    """Prints what may come next, and ends the process. `command`: what the parser makes of the
    program; nothing of it runs."""
    completion_init()
    command([], prog_name=PROGRAM, complete_var=VARIABLE)
