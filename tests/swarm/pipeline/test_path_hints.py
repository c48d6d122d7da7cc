"""A dead middle stage is done again alone: what lay behind it is not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from swarmnet.ports import LossResult, Passage
from swarmnet.protocol.pipeline.ledger import StepKey
from swarmnet.training.stage import TorchStage
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

FIRST, MIDDLE, LAST = 0, 1, 2


def test_the_work_behind_a_dead_replica_is_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are four replicas of the last stage: only the hint leads back to the one that has the
    receipt."""
    spec = tiny_spec(tmp_path, num_stages=3, rounds=30)
    worked: Counter[StepKey] = Counter()
    compute = TorchStage.loss_pass

    def count(self: TorchStage, key: StepKey, *given: Any) -> Passage[LossResult]:
        def counted(result: LossResult) -> LossResult:
            worked[key] += 1
            return result

        return compute(self, key, *given).then(counted)

    monkeypatch.setattr(TorchStage, "loss_pass", count)

    async def scenario(swarm: Swarm) -> None:
        for i, stage in enumerate((FIRST, MIDDLE, MIDDLE, LAST, LAST, LAST, LAST)):
            swarm.start(f"peer-{i}", stage=stage)
        await swarm.until_round(5)
        victim = swarm.members["peer-1"].peer
        flights = victim.steps.flights
        await swarm.until(lambda: len(flights.beyond()) >= 2)
        beyond = [key for key, path in flights.beyond().items() if path]
        swarm.kill("peer-1")
        await swarm.until(lambda: all(worked[key] for key in beyond))
        await swarm.until_round(max(swarm.rounds()) + 3)
        assert [worked[key] for key in beyond] == [1] * len(beyond)
        assert swarm.total("rerouted") >= len(beyond)
        assert max(worked.values()) == 1

    in_virtual_time(scenario, spec)
