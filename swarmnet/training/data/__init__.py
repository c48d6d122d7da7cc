"""Data: from files of text, records and dialogues to samples of tokens.

`opening` puts together what the other modules do:

- `files`, `formats`, `readers` and `bad_records`: documents out of files;
- `chat` and `encoding`: documents as tokens, and which of them are learned;
- `tokenizing`, `store` and `cache`: all documents of a source on the disk, once;
- `held_out`, `order` and `packing`: samples out of documents;
- `text_data`: samples of all sources, as the swarm takes them (`ports.Data`).
"""

from swarmnet.training.data.opening import Place, open_data
from swarmnet.training.data.text_data import TextData

__all__ = ["Place", "TextData", "open_data"]
