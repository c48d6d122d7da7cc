"""What routers did is told without a series for each of thousands of experts."""

from __future__ import annotations

import pytest

from peer.observe.prometheus import MAX_EXPERTS_TOLD, routers_of
from swarmnet.ports import RouterReport


@pytest.mark.parametrize(("num_layers", "num_experts"), [(2, 4), (2, MAX_EXPERTS_TOLD), (90, 4)])
def test_routers_have_few_series(num_layers: int, num_experts: int) -> None:
    shares = tuple(2 * (i + 1) / num_experts / (num_experts + 1) for i in range(num_experts))
    reports = [RouterReport(f"layer {k}", shares, 0.25, 1.5) for k in range(num_layers)]
    share, dropped, entropy = routers_of(reports)
    told = {(s.labels["layer"], s.labels["expert"]): s.value for s in share.samples}
    assert told["layer 1", "most"] == shares[-1]
    assert told["layer 1", "least"] == shares[0]
    assert (("layer 0", "0") in told) == (num_layers * num_experts <= MAX_EXPERTS_TOLD)
    assert len(told) <= 2 * num_layers + MAX_EXPERTS_TOLD
    assert [s.value for s in dropped.samples] == [0.25] * num_layers
    assert [s.value for s in entropy.samples] == [1.5] * num_layers


def test_a_stage_without_experts_tells_nothing_of_them() -> None:
    assert list(routers_of(())) == []
