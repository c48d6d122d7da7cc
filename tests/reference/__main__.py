"""Writes the pages."""

from __future__ import annotations

from tests.reference.pages import FOLDER, PAGES


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())


if __name__ == "__main__":
    main()
