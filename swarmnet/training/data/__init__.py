"""Data: from files of text, records and dialogues to samples of tokens.

`opening` puts together what the other modules do:

- `files`, `formats`, `readers` and `bad_records`: documents out of files;
- `chat`, `tokenizer` and `encoding`: documents as tokens, and which of them are learned; a
  process of its own does that (`swarmnet.parsing`), by the functions of `in_child`;
- `tokenizing`, `store` and `cache`: all documents of a source on the disk, once;
- `held_out`, `order` and `packing`: samples out of documents;
- `text_data`: samples of all sources, as the swarm takes them (`ports.Data`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarmnet.training.data.opening import Place, open_data
    from swarmnet.training.data.text_data import TextData

__all__ = ["Place", "TextData", "open_data"]


def __getattr__(name: str) -> Any:
    """Imported when they are used: a process that parses tokenizers needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "text_data" if name == "TextData" else "opening"
    return getattr(import_module(f"swarmnet.training.data.{module}"), name)
