"""Files that are made to do harm to who parses them."""

from __future__ import annotations

import base64
import json
from typing import Any

LONG = 1 << 60
WORDS = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"}


def tokenizer(**parts: Any) -> bytes:
    """A tokenizer.json, small and right but for these parts."""
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    whole = {"version": "1.0", "added_tokens": [], **dict.fromkeys(names), "model": WORDS, **parts}
    return json.dumps(whole).encode()


def bpe(**parts: Any) -> dict[str, Any]:
    """A model of byte pairs."""
    return {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [], **parts}


def charsmap(data: bytes) -> dict[str, Any]:
    """A normalizer that is a table."""
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def growing(times: int, each: int) -> dict[str, Any]:
    """A normalizer that makes a character into `each`, so often."""
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * each}
    return {"type": "Sequence", "normalizers": [step] * times}


TOKENIZERS = {
    "a table that says it is of 2 GiB": tokenizer(
        normalizer=charsmap(b"\xff\xff\xff\x7f" + bytes(8))
    ),
    "an empty table": tokenizer(normalizer=charsmap(b"")),
    "a prefix longer than a merge": tokenizer(
        model=bpe(merges=[["a", "b"]], continuing_subword_prefix="z" * 7)
    ),
    "a prefix that cuts a character": tokenizer(
        model=bpe(
            vocab={"a": 0, "é": 1, "aé": 2}, merges=[["a", "é"]], continuing_subword_prefix="x"
        )
    ),
    "parts of no length": tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "a text that grows a thousandfold, three times": tokenizer(normalizer=growing(3, 1000)),
    "an unknown token that there is not": tokenizer(
        model=bpe(vocab={"a": 0}, byte_fallback=True, unk_token="none")
    ),
    "no unknown token": tokenizer(
        model={"type": "Unigram", "vocab": [["zz", 0.0]], "unk_id": None}
    ),
    "tables in tables": tokenizer().replace(
        b'"pre_tokenizer": null',
        b'"pre_tokenizer": ' + b'{"type": "Sequence", "pretokenizers": [' * 9999 + b"]}" * 9999,
    ),
    "no JSON": b'{"version',
    "no text": b"\xff\xfe\xff",
    "a list": b"[" * 100_000,
}
"""That cannot be loaded, or not encode "ab a"."""

STRIPS = tokenizer(decoder={"type": "Strip", "content": "a", "start": LONG, "stop": LONG})
"""Its texts cannot be decoded."""

X = "{% set x = 'a' * 8000000 %}"
TEMPLATES = {
    "bytes": "{% set x = 'a'.encode() * 8000000 %}{{ x * 8000000 }}",
    "bytes, piece by piece": (
        "{% set ns = namespace(x='a'.encode()) %}{% for i in range(60) %}"
        "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}"
    ),
    "bytes, joined": "{{ ('a' * 8000).encode().join([''.encode()] * 999999) }}",
    "bytes, replaced": "{{ ('a' * 8000000).encode().replace('a'.encode(), ('b' * 999).encode()) }}",
    "translate": "{{ ('a' * 8000000).translate({97: 'b' * 8000}) }}",
    "translate, a few times": (
        "{% set ns = namespace(x='a' * 4000) %}{% for i in range(9) %}"
        "{% set ns.x = ns.x.translate({97: 'a' * 1000}) %}{% endfor %}{{ ns.x | length }}"
    ),
    "hex": X + "{% for i in range(999) %}{{ x.encode().hex() }}{% endfor %}",
    "decoded": "{{ ('a' * 8000000).encode('utf-32').decode('latin-1') * 9 }}",
    "codecs": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x.encode('utf-32').decode('latin-1') %}{% endfor %}{{ ns.x }}",
    "numbers to bytes": "{{ (1).to_bytes(4000000000, 'big') }}",
    "splitting": "{% set l = [] %}" + X + "{% for i in range(99) %}{{ x.split('a') }}{% endfor %}",
    "partition": X + "{{ (x.partition('b') * 999) | join | length }}",
    "a slice of numbers": "{{ range(99999) | slice(99999) | list }}",
    "batches": "{{ range(3) | batch(999999999, 'x') | list }}",
    "expanded tabs": "{{ ('\t' * 999999).expandtabs(99999) }}",
    "a wide field": "{{ '{:>999999999}'.format(1) }}",
    "a wide field, hidden": "{{ '{:>{}}'.format(1, 999999999) }}",
    "powers": "{{ (9 ** 9) ** (9 ** 9) }}",
    "macros that call themselves": "{% macro m(n) %}{{ m(n) ~ m(n) }}{% endmacro %}{{ m(1) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested lists": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
        "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}"
    ),
    "nested code": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "classes": "{{ ''.__class__.__mro__ }}",
    "words that are kept": "".join(
        f"{{% set x{k} = ('ab ' * 2600000).split() %}}" for k in range(10)
    ),
    "a translation that is counted twice": "{{ 'a'.maketrans({'a': 'b' * 9000000}) }}",
}
"""Of chats: each makes too much, takes too long, or is broken."""
