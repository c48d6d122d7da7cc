from __future__ import annotations

from swarmnet.protocol.membership.indices import ALL, AnswerCache, StageIndex


def test_ids_are_sorted_and_follow_moves() -> None:
    index = StageIndex()
    for peer_id, stage in (("c", 0), ("a", 0), ("b", 1)):
        index.add(peer_id, stage)
    assert list(index.ids(ALL)) == ["a", "b", "c"]
    assert list(index.ids(0)) == ["a", "c"]
    assert list(index.ids(7)) == []
    index.move("c", 0, 1)
    assert list(index.ids(0)) == ["a"]
    assert list(index.ids(1)) == ["b", "c"]
    index.remove("b", 1)
    assert list(index.ids(1)) == ["c"]
    assert list(index.ids(ALL)) == ["a", "c"]


def test_an_answer_is_asked_for_once_until_it_is_dropped_or_lapses() -> None:
    asked: list[str] = []
    cache = AnswerCache(lambda stage, now: now + 10.0)

    def get(stage: int, now: float) -> int:
        return cache.get(stage, "name", now, lambda: asked.append(f"{stage} {now}") or len(asked))

    assert [get(0, 0.0), get(0, 10.0), get(1, 5.0), get(ALL, 5.0)] == [1, 1, 2, 3]
    cache.drop(0)
    assert get(1, 6.0) == 2, "the other stage has not changed"
    assert get(0, 6.0) == 4
    assert get(ALL, 6.0) == 5, "what concerns a stage concerns all"
    assert get(0, 10.1) == 6, "the first answer was found at 0"
    assert get(1, 15.0) == 2
    cache.clear()
    assert get(1, 15.0) == 7
