"""`swarmnet example`: the examples of the documentation, written to where it has them."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import peer
from swarmnet.errors import UsageError, UserError
from swarmnet.files import write_whole

DISTRIBUTION = "swarmnet-train"
FOLDER = "examples"
"""In the current folder: what is in the files, and in the documentation, are paths from there."""
EXAMPLES = {
    "run": ("run.toml",),
    "finetune": ("finetune/run.toml", "finetune/talks.jsonl", "finetune/ask.py"),
    "custom-model": ("custom_model.toml", "custom_model.py"),
    "notebook": ("notebook.ipynb",),
    "research": ("research.py",),
}
"""Files by name of an example; the first of them is what to begin with."""
BEGIN = {".toml": "swarmnet local --spec {}", ".py": "python {}", ".ipynb": "jupyter lab {}"}


def write_example(name: str, here: Path) -> str:
    """Writes an example below `here`; returns how to begin with it. A file that is there already
    stays where it says the same. Raises `UserError`."""
    if name not in EXAMPLES:
        raise UsageError(f"there is no example {name!r}; there are: {', '.join(EXAMPLES)}")
    source, out = examples_folder(), here / FOLDER
    contents = {out / each: (source / each).read_bytes() for each in EXAMPLES[name]}
    try:
        for path, data in contents.items():
            if path.exists() and path.read_bytes() != data:
                raise UserError(f"{path} is there already, and differs; move it away")
        for path, data in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)
    except OSError as e:
        raise UserError(f"cannot write {e.filename or out}: {e.strerror or e}") from None
    first = Path(FOLDER, EXAMPLES[name][0])
    return BEGIN[first.suffix].format(first)


def examples_folder() -> Path:
    """In the clone, or where the wheel has put it. Raises `UserError`."""
    clone = Path(peer.__file__).resolve().parents[1] / FOLDER
    found = [clone / "custom_model.toml"]
    try:
        files = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        files = []
    found += [Path(str(f.locate())) for f in files if f.parts[-2:] == (FOLDER, "custom_model.toml")]
    for path in found:
        if path.is_file():
            return path.resolve().parent
    raise UserError("this installation has no examples; they are in the repository")
