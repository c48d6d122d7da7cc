"""A run keeps its id: through new options, other languages and later versions."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from swarmnet.errors import SpecError
from swarmnet.run_identity import MAX_WHOLE, from_json, to_json, written_values
from swarmnet.spec import TABLES, RunSpec, SyncSpec, parse_spec
from tests.golden import run_ids
from tests.test_spec import CUSTOM, LLAMA, change, failure


def resolved(text: str = LLAMA) -> RunSpec:
    return parse_spec(text).resolved(layers=[3, 3], shard_parameters=4096)


def with_values(spec: RunSpec, **tables: dict[str, Any]) -> bytes:
    """A canonical text with further keys in some tables."""
    values = json.loads(spec.canonical())
    for table, more in tables.items():
        values[table] = values.get(table, {}) | more
    return to_json(values)


# ---- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "text"),
    [  # RFC 8785, appendix B
        ("0000000000000000", "0"),
        ("8000000000000000", "0"),
        ("0000000000000001", "5e-324"),
        ("8000000000000001", "-5e-324"),
        ("7fefffffffffffff", "1.7976931348623157e+308"),
        ("ffefffffffffffff", "-1.7976931348623157e+308"),
        ("4340000000000000", "9007199254740992"),
        ("c340000000000000", "-9007199254740992"),
        ("4430000000000000", "295147905179352830000"),
        ("44b52d02c7e14af5", "9.999999999999997e+22"),
        ("44b52d02c7e14af6", "1e+23"),
        ("44b52d02c7e14af7", "1.0000000000000001e+23"),
        ("444b1ae4d6e2ef4e", "999999999999999700000"),
        ("444b1ae4d6e2ef4f", "999999999999999900000"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
        ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("41b3de4355555553", "333333333.3333332"),
        ("41b3de4355555554", "333333333.33333325"),
        ("41b3de4355555555", "333333333.3333333"),
        ("becbf647612f3696", "-0.0000033333333333333333"),
        ("43143ff3c1cb0959", "1424953923781206.2"),
    ],
)
def test_numbers_are_written_as_the_rfc_says(bits: str, text: str) -> None:
    [number] = struct.unpack(">d", bytes.fromhex(bits))
    assert to_json(number).decode() == text
    assert from_json(text) == number
    assert to_json(from_json(text)).decode() == text


def test_keys_and_texts_are_written_as_the_rfc_says() -> None:
    values = {"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\U0001f600": 5, "\x80": 6, "\xf6": "\n"}
    in_order = ["\r", "1", "\x80", "\xf6", "\u20ac", "\U0001f600", "\ufb33"]
    text = to_json(values)
    assert list(json.loads(text)) == in_order
    assert b'"\\r":2' in text
    assert '"ö":"\\n"'.encode() in text


def numbers_of(table: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in table.model_fields.items():
        if field.annotation is int:
            yield name, field


def test_no_whole_number_of_a_spec_is_beyond_what_json_keeps() -> None:
    for table in TABLES.values():
        for name, field in numbers_of(table):
            limits = [getattr(m, "le", None) or getattr(m, "lt", None) for m in field.metadata]
            assert any(limit is not None and limit <= MAX_WHOLE for limit in limits), name
    assert parse_spec(change("seed = 7", f"seed = {MAX_WHOLE}")).seed == MAX_WHOLE
    said = failure(change("seed = 7", f"seed = {MAX_WHOLE + 1}"))
    assert said.startswith("seed must be below 2^53 (9007199254740992)")
    said = failure(change("width = 32", f"width = {MAX_WHOLE + 1}", CUSTOM))
    assert "options may hold whole numbers up to 2^53 - 1" in said


# ---- new options ------------------------------------------------------------------------------


def test_a_key_at_its_default_is_not_written() -> None:
    spec = resolved()
    values = json.loads(spec.canonical())
    assert values["optimizer"] == {"learning_rate": 0.003, "rounds": 50, "warmup_rounds": 5}
    assert "security" not in values
    as_default = parse_spec(
        LLAMA + '[sync]\nmode = "zero"\nreplication = 2\n[security]\nadmission = "open"\n'
    )
    assert as_default.run_id == parse_spec(LLAMA).run_id


def test_a_new_key_leaves_old_runs_their_text() -> None:
    class NewerSync(SyncSpec):
        compression: str = "none"
        weights: tuple[float, ...] = ()

    old, new = SyncSpec(local_steps=7), NewerSync(local_steps=7)
    assert written_values(new) == written_values(old) == {"local_steps": 7}
    used = NewerSync(local_steps=7, compression="int8")
    assert written_values(used) == {"local_steps": 7, "compression": "int8"}


def test_every_id_is_what_it_was() -> None:
    kept, computed = run_ids.kept(), run_ids.computed()
    missing = sorted(computed.keys() - kept.keys())
    assert not missing, f"{missing}: new specs; add their ids with python -m tests.golden"
    for path, entry in kept.items():
        assert computed.get(path) == entry, (
            f"{path}: the run has another identity now, so that peers, invites and state folders "
            "of earlier releases do not belong to it. Take the change back: a default never "
            "changes its meaning (a new default needs a new key), a new key is left out at its "
            "default, and what the program chooses for an open key stays. Where the file itself "
            "was edited, take that back, or remove its entry and run python -m tests.golden"
        )


# ---- what comes from others -------------------------------------------------------------------


def test_only_the_canonical_text_is_read() -> None:
    spec = resolved()
    text = spec.canonical()
    assert RunSpec.from_canonical(text) == spec
    spaced = json.dumps(json.loads(text), sort_keys=True).encode()
    for other in (
        with_values(spec, sync={"replication": 2}),
        text.replace(b"0.003", b"3e-3"),
        text.replace(b'"seed":7', b'"seed":7,"seed":7'),
        spaced,
    ):
        assert other != text
        with pytest.raises(SpecError, match="the peer that sent it is faulty"):
            RunSpec.from_canonical(other)


@pytest.mark.parametrize(
    ("tables", "name"),
    [
        ({"sync": {"compression": "int8"}}, r"\[sync\] compression"),
        ({"privacy": {"noise": 1}}, "privacy"),
        ({"sync": {"mode": "quantum"}}, r"\[sync\] mode = quantum"),
        ({"sync": {"a\nb": 1}}, r"\[sync\] 'a\\nb'"),
    ],
)
def test_a_newer_spec_says_that_the_program_is_too_old(
    tables: dict[str, dict[str, Any]], name: str
) -> None:
    with pytest.raises(SpecError, match=f"{name} is not known to swarmnet .* newer") as caught:
        RunSpec.from_canonical(with_values(resolved(), **tables))
    assert "\n" not in str(caught.value)
    assert "faulty" not in str(caught.value)
