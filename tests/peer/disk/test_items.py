"""What may be removed, by name and by a bound; never what somebody holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.disk.items import CHECKPOINTS, TOKENS, Item, beyond, named
from swarmnet.errors import UsageError


def saved(name: str, run_id: str, run_name: str = "", held_by: str = "") -> Item:
    return Item(f"{name}/checkpoints/{run_id}", CHECKPOINTS, 10, 1.0, run_id, run_name, held_by)


ITEMS = (
    saved("peer-1", "aaaa1111", "训练"),
    saved("peer-2", "aaaa1111", "训练"),
    saved("peer-1", "aaaa2222", "other"),
    saved("peer-3", "bbbb", "held", "a peer is at work"),
    Item("tokens/1234", TOKENS, 10, 1.0),
)


@pytest.mark.parametrize(
    ("name", "indices"),
    [
        ("peer-1/checkpoints/aaaa1111", [0]),
        ("peer-1", [0, 2]),
        ("peer-1/", [0, 2]),
        ("训练", [0, 1]),
        ("aaaa1111", [0, 1]),
        ("aaaa2", [2]),
        ("tokens/1234", [4]),
    ],
)
def test_what_a_name_means(name: str, indices: list[int]) -> None:
    assert named(ITEMS, name) == [ITEMS[i] for i in indices]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aaaa", "2 runs are called so; name one by its id: aaaa1111, aaaa2222"),
        ("aaa", "there is nothing called aaa; `swarmnet state` lists"),
        ("", "there is nothing called"),
        ("peer", "there is nothing called peer"),
        ("bbbb", "peer-3/checkpoints/bbbb stays: a peer is at work"),
    ],
)
def test_what_is_not_removed_is_one_line(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        named(ITEMS, name)


SOME = st.builds(
    Item,
    st.text("abc", min_size=1, max_size=4),
    st.just(TOKENS),
    st.integers(0, 1000),
    st.floats(0, 100),
    held_by=st.sampled_from(["", "somebody"]),
)


@given(st.lists(SOME, max_size=8, unique_by=lambda i: i.name), st.integers(0, 4000))
def test_a_bound_takes_the_oldest_that_nobody_holds(items: list[Item], keep: int) -> None:
    going = beyond(items, keep)
    left = [i for i in items if i not in going]
    assert not any(i.held_by for i in going)
    free = [i for i in left if not i.held_by]
    assert sum(i.size for i in left) <= keep or not free
    if going:
        assert all(i.used_unix_s >= going[-1].used_unix_s for i in free)
        before_the_last = sum(i.size for i in left) + going[-1].size
        assert before_the_last > keep, "no more than is needed"
