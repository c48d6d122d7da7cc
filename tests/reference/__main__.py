"""Writes the pages, and the one for `man`."""

from __future__ import annotations

from tests.reference.pages import FOLDER, MAN_PAGE, PAGES, man_page


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
    MAN_PAGE.write_text(man_page())


if __name__ == "__main__":
    main()
