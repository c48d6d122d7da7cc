"""Pictures of what a terminal shows, for the pages. As a program it draws that of `swarmnet local`:

    python -m tests.peer.pictures

The state of the run is in `observe/local_state.json`: a line of the metrics of
`swarmnet local --peers 5 --rounds 30 --metrics FILE`.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from peer.observe.screen import dashboard
from swarmnet.observe.view_model import PeerRow, RoundSplit, StageRow, ViewModel
from swarmnet.runtime.options import default_spec_path
from swarmnet.spec import load_spec

IMAGES = Path(__file__).parents[2] / "docs" / "images"
LOCAL = IMAGES / "local.svg"
STATE = Path(__file__).parent / "observe" / "local_state.json"
COLUMNS = 112
FONTS = re.compile(r"\n *@font-face \{.*?\}", re.DOTALL)
"""They would be fetched from elsewhere."""


def drawn(what: RenderableType, title: str, name: str) -> str:
    """A terminal that shows it, as SVG. `name` is part of the ids in it: none twice on a page."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(what)
    return FONTS.sub("", console.export_svg(title=title, unique_id=name)) + "\n"


def local() -> str:
    """The screen of a run that was recorded."""
    state = json.loads(STATE.read_text())
    values: dict[str, Any] = {**state["model"]}
    for key in ("num_live", "uncovered"):  # follow from the rest
        del values[key]
    values["stages"] = tuple(StageRow(**row) for row in values["stages"])
    values["peers"] = tuple(PeerRow(**row) for row in state["peers"])
    values["split"] = RoundSplit(**values["split"])
    screen = dashboard(load_spec(default_spec_path()), ViewModel(**values))
    return drawn(screen, "swarmnet local --peers 5", "local")


if __name__ == "__main__":
    LOCAL.write_text(local())
