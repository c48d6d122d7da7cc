"""What visitors of the page are told."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

from peer.observe.dashboard.hub import MAX_EVENTS_KEPT, MAX_ROUNDS_KEPT, MAX_WAITING, thin
from tests.dashboard.making import Played, feeder, held_out, replica


def test_a_visitor_gets_everything_and_then_what_changes() -> None:
    async def main() -> None:
        played = Played()
        played.look(replica("a", 0), replica("b", 1), replica("c", 1))
        visit = played.hub.visit()
        state = await anext(visit)
        assert (state["kind"], set(state["peers"])) == ("state", {"a", "b", "c"})
        assert [s["num_replicas"] for s in state["model"]["stages"]] == [1, 2]
        assert state["model"]["stages"][0]["risk"] == "stage 0: one failure from loss"
        assert [e["text"] for e in state["events"]] == [
            "peer a joined (stage 0)",
            "peer b joined (stage 1)",
            "peer c joined (stage 1)",
        ]

        played.look(replica("a", 0), replica("b", 1), replica("c", 1))  # nothing new
        changed = replica("c", 1, queue_length=3, version=2)
        played.look(replica("a", 0), replica("b", 1), changed)
        tick = await anext(visit)
        assert set(tick) == {"kind", "peers"}
        assert set(tick["peers"]) == {"c"}
        assert tick["peers"]["c"]["queue_length"] == 3

        played.look(replica("a", 0), replica("b", 1), changed, dead=("b",))
        tick = await anext(visit)
        assert tick["peers"]["b"]["state"] == "lost"
        assert [e["kind"] for e in tick["events"]] == ["peer_lost"]
        assert tick["model"]["stages"][1]["risk"] == "stage 1: one failure from loss"
        played.look(replica("a", 0), changed)
        assert (await anext(visit))["peers"]["b"] is None
        await visit.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())


def test_differences_add_up_to_the_state() -> None:
    async def main() -> None:
        played = Played()
        visit = played.hub.visit()
        page: dict[str, Any] = json.loads(json.dumps(await anext(visit)))
        told = 0
        for r in range(12):
            others = [replica(f"p{k}", k % 2, r, queue_length=r * k % 5) for k in range(r % 7)]
            a = feeder("a", r, loss=3.0 - r / 10, held_out=held_out(r, 3.0) if r % 4 == 0 else None)
            played.look(a, replica("b", 1, r), *others, dead=("p1",) if r % 3 == 0 else ())
            told += 1
        for queued in range(told):
            tick = await asyncio.wait_for(anext(visit), 1) if queued < told - 1 else None
            for key, value in json.loads(json.dumps(tick or {})).items():
                if key in ("peers", "given"):
                    page[key] |= value
                elif key in ("rounds", "held_out", "events"):
                    page[key] += value
                elif key == "model":
                    page["model"] = value
            if tick is None:
                break
        tick = await asyncio.wait_for(anext(visit), 1)
        for key in ("peers", "given"):
            page[key] |= tick.get(key, {})
        page["model"] = tick.get("model", page["model"])
        for key in ("rounds", "held_out", "events"):
            page[key] += tick.get(key, [])
        page["peers"] = {k: v for k, v in page["peers"].items() if v is not None}
        assert page == json.loads(json.dumps(played.hub.state()))
        assert len(page["rounds"]) > 5
        await visit.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())


def test_a_visitor_is_told_what_each_machine_gave_now_and_then() -> None:
    async def main() -> None:
        played = Played()
        visit = played.hub.visit()
        await anext(visit)
        ticks = []
        for second in range(12):
            computed = {"samples_computed": second % 8}  # it is started anew after eight
            a = replica("a", 0, incarnation=1 + second // 8, version=second, totals=computed)
            played.look(a, replica("b", 1), replica("c", 1, version=second))
            ticks.append(await anext(visit))
        told = [(i, tick["given"]) for i, tick in enumerate(ticks) if "given" in tick]
        assert [i for i, _ in told] == [0, 5, 10], "not in every message"
        assert [given["a"]["samples_computed"] for _, given in told] == [0, 5, 7 + 2]
        assert [given["a"]["serving_s"] for _, given in told] == [0.0, 5.0, 10.0]
        assert played.hub.state()["given"]["a"] == told[-1][1]["a"]
        played.look()  # all are gone
        assert set(played.hub.state()["given"]) == {"a", "b", "c"}
        await visit.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())


def test_who_is_too_slow_is_told_everything_anew() -> None:
    async def main() -> None:
        played = Played()
        played.look(replica("a", 0))
        visit = played.hub.visit()
        await anext(visit)
        everybody = [replica("a", 0), *(replica(f"p{n}", 1) for n in range(MAX_WAITING + 5))]
        for n in range(2, len(everybody) + 1):
            played.look(*everybody[:n])
        state = await anext(visit)
        assert state["kind"] == "state"
        assert [e["kind"] for e in state["events"]] == ["peer_joined"] * len(everybody)
        played.look(*everybody[1:])
        tick = await anext(visit)
        assert (tick["kind"], [e["kind"] for e in tick["events"]]) == ("tick", ["peer_lost"])
        await visit.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())


def test_who_is_too_slow_hears_of_the_end_too() -> None:
    async def kinds(num_looks: int, *, closes_early: bool = False) -> list[str]:
        played = Played()
        visit = played.hub.visit()
        await anext(visit)
        if closes_early:
            played.hub.close()
        for n in range(num_looks):
            played.look(replica("a", 0, queue_length=n, version=n))
        played.hub.close()
        async with asyncio.timeout(10.0):
            return [message["kind"] async for message in visit]

    assert asyncio.run(kinds(MAX_WAITING)) == ["state"]
    assert asyncio.run(kinds(MAX_WAITING + 5)) == ["state"]
    assert asyncio.run(kinds(3)) == ["tick"] * 3
    assert asyncio.run(kinds(MAX_WAITING + 5, closes_early=True)) == []


def test_a_state_stays_as_it_was_told() -> None:
    """It is sent later than it is made, and what follows comes in the next ticks."""
    played = Played(num_stages=1)
    played.look(feeder("a", 0, loss=3.0, held_out=held_out(0, 3.0)))
    played.look(feeder("a", 1, loss=3.0))
    state = played.hub.state()
    before = json.dumps(state)
    played.look(feeder("a", 2, loss=2.0, held_out=held_out(2, 2.0)), replica("b", 0, 2))
    assert len(played.hub.state()["rounds"]) > len(state["rounds"])
    assert json.dumps(state) == before


def test_what_is_kept_is_bounded() -> None:
    played = Played(num_stages=1, rounds=100_000)
    for r in range(MAX_ROUNDS_KEPT + 700):
        name = f"p{r % 50}" if r % 2 else "a"
        played.look(feeder("a", r, loss=1.0), replica(name + "x", 0, r))
    state = played.hub.state()
    assert len(state["rounds"]) <= MAX_ROUNDS_KEPT
    rounds = [point[0] for point in state["rounds"]]
    assert rounds == sorted(rounds)
    assert rounds[-1] > MAX_ROUNDS_KEPT
    assert len(state["events"]) <= MAX_EVENTS_KEPT


def test_a_long_curve_is_whole_and_as_dense_everywhere() -> None:
    curve: list[list[int]] = []
    num_rounds = 50 * MAX_ROUNDS_KEPT
    for r in range(num_rounds):
        curve.append([r])
        thin(curve)
    assert len(curve) <= MAX_ROUNDS_KEPT
    rounds = [point[0] for point in curve]
    assert (rounds[0], rounds[-1]) == (0, num_rounds - 1)
    assert max(b - a for a, b in pairwise(rounds)) <= 4 * num_rounds / MAX_ROUNDS_KEPT


def test_a_peers_history() -> None:
    played = Played()
    for n in range(20):
        played.look(replica("a", 0, totals={"sent_bytes": 100 * n}), replica("b", 1))
    history = played.hub.history("a")
    sent = [point[3] for point in history["points"]]
    assert len(sent) >= 3
    assert sent == sorted(sent)
    assert [e["kind"] for e in history["events"]] == ["peer_joined"]
    assert played.hub.history("nobody") == {"peer_id": "nobody", "points": [], "events": []}


def test_a_visitor_is_told_that_the_run_hangs_on_one_feeder() -> None:
    async def main() -> None:
        played = Played()
        played.look(replica("a", 0, has_data=True), replica("b", 1))
        state = await anext(played.hub.visit())
        assert state["model"]["data_risk"].startswith("the run hangs on a, its only feeder")

    asyncio.run(main())
