"""Diagrams of the pages are pictures of their texts."""

from __future__ import annotations

import re
from html import unescape

import pytest

from tests.docs.diagrams import DIAGRAMS, IMAGES, Messages, Peers, drawn

PAGES = sorted(IMAGES.parent.rglob("*.md"))


@pytest.mark.parametrize("name", DIAGRAMS)
def test_a_picture_is_that_of_its_text(name: str) -> None:
    """`python -m tests.docs.diagrams` draws it anew."""
    assert (IMAGES / f"{name}.svg").read_text() == drawn(DIAGRAMS[name])


@pytest.mark.parametrize("name", DIAGRAMS)
def test_a_picture_has_all_of_its_text(name: str) -> None:
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", drawn(DIAGRAMS[name]))
    texts = {unescape(each).strip() for each in shown}
    diagram = DIAGRAMS[name]
    boxes = (
        [label for _, _, label in diagram.places.values()]
        if isinstance(diagram, Peers)
        else list(diagram.columns.values())
    )
    labels = [re.sub(r"^\w (?:<?--|<?\.\.)>? \w: ", "", line) for line in wanted(diagram)]
    assert set("\n".join([*boxes, *labels]).splitlines()) <= texts


def wanted(diagram: Peers | Messages) -> list[str]:
    return [line.strip() for line in diagram.text.strip().splitlines()]


def test_a_page_needs_no_script_to_show_a_diagram() -> None:
    """A forge that shows the page, and a browser without a network, have the picture."""
    pages = {page.name: page.read_text() for page in PAGES}
    assert [name for name, text in pages.items() if "```mermaid" in text] == []
    for name in DIAGRAMS:
        assert any(f"](images/{name}.svg)" in text for text in pages.values()), name
