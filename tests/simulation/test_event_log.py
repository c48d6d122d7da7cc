from __future__ import annotations

from swarmnet.simulation.event_log import EventLog


def test_a_line_has_time_kind_and_facts() -> None:
    log = EventLog(lambda: 1.5)
    log.write("crash", peer="a", stage=1)
    log.write("end")
    assert log.lines == ("1.500000 crash peer=a stage=1", "1.500000 end ")


def test_the_hash_is_that_of_the_lines_whether_they_are_kept_or_not() -> None:
    logs = [EventLog(lambda: 2.0, keeps_lines=keeps) for keeps in (True, False)]
    for log in logs:
        log.write("join", peer="a")
    assert logs[0].digest == logs[1].digest
    assert logs[1].lines == ()
    before = logs[0].digest
    logs[0].write("join", peer="b")
    assert logs[0].digest != before
