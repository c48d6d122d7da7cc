"""One that says of itself what is not so: rounds, samples, histories and losses."""

from __future__ import annotations

from tests.hostile.attacker import Attacker
from tests.hostile.attacks import claims, offers_a_checkpoint, turns
from tests.hostile.trial import OPEN_PART, trial
from tests.swarm.harness import SIZES, Swarm


def test_samples_of_its_own_parameters_win_over_nobody() -> None:
    """As many as a round has, and more than it has; its id is the lowest."""

    def untouched(swarm: Swarm, attacker: Attacker) -> None:
        assert swarm.total("diverged") == swarm.total("stage_restarted") == 0

    for samples in (1 << 61, 32):
        pace = trial(claims(SIZES.num_shards, samples=samples), during_s=5.0, look=untouched)
        assert pace.after >= OPEN_PART * pace.before, str(pace)


def test_many_names_with_the_same_parameters_win_over_nobody() -> None:
    """They are twice the replicas of the stage, as many as count without work, and were one with it
    before."""

    def untouched(swarm: Swarm, attacker: Attacker) -> None:
        assert swarm.total("diverged") == swarm.total("stage_restarted") == 0

    pace = trial(turns(8, SIZES.num_shards), during_s=6.0, look=untouched)
    print(pace)
    assert pace.held(), pace


def test_nobody_waits_for_the_checkpoint_that_a_newcomer_says_it_brings() -> None:
    pace = trial(offers_a_checkpoint(SIZES.num_shards), during_s=5.0)
    assert pace.during >= OPEN_PART * pace.before, str(pace)
