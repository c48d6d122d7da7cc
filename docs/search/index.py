"""A hook of mkdocs: the index of the search as a script too. A page that is opened as a file may
run scripts beside it, and may not read JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_post_build(config: Any) -> None:
    """After the search plugin of mkdocs has written its index."""
    folder = Path(config.site_dir) / "search"
    index = (folder / "search_index.json").read_text(encoding="utf-8")
    (folder / "search_index.js").write_text(f"const searchIndex = {index};\n", encoding="utf-8")
    (folder / "worker.js").unlink()  # of the script that main.js stands for
