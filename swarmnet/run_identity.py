"""The canonical text of a run's spec, and the run's id, which is its hash.

The text must be the same on every machine, in every version of the program and in every language,
for a changed byte is another run. Two rules make it so:

- It is JSON as RFC 8785 (JSON canonicalization scheme) writes it: sorted keys, no spaces, one
  specified text for each number. Numbers are IEEE doubles, so whole numbers go to 2^53 - 1.
- A key at its default is left out. A release may add a key, and runs that do not use it keep their
  id. So the default of a key never changes its meaning: a new default needs a new key.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import rfc8785
from pydantic import BaseModel

RUN_ID_BYTES = 16
MAX_WHOLE = (1 << 53) - 1
"""The largest whole number that every JSON reader keeps exactly (RFC 8785, section 3.2.2.3)."""


def to_json(values: Any) -> bytes:
    """RFC 8785 text of plain values. Raises `ValueError`: a number is not finite or a whole number
    is beyond `MAX_WHOLE` (`rfc8785.IntegerDomainError`), or a value is of another kind."""
    return rfc8785.dumps(values)


def from_json(text: bytes | str) -> Any:
    """Plain values of a JSON text. A whole number beyond `MAX_WHOLE` is a float here, for RFC 8785
    writes 1e20 as 100000000000000000000. Raises `ValueError` or `RecursionError`."""
    return json.loads(text, parse_int=_whole_or_float, parse_constant=_refuse)


def written_values(table: BaseModel) -> dict[str, Any]:
    """The values of a table that differ from their defaults, by key; likewise of the tables
    within."""
    values: dict[str, Any] = {}
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        if not field.is_required() and value == field.get_default(call_default_factory=True):
            continue
        values[name] = _written(value)
    return values


def _written(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return written_values(value)
    if isinstance(value, dict):
        return {key: _written(within) for key, within in value.items()}
    if isinstance(value, tuple | list):
        return [_written(within) for within in value]
    return value


def run_id_of(canonical: bytes) -> str:
    """32 hex digits: BLAKE2b of a canonical text."""
    return hashlib.blake2b(canonical, digest_size=RUN_ID_BYTES).hexdigest()


def _whole_or_float(digits: str) -> int | float:
    number = int(digits)
    return number if abs(number) <= MAX_WHOLE else float(digits)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
