"""From a prompt, as people give one, to a text of the run's model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from swarmnet.errors import UserError
from swarmnet.parsing.frames import given
from swarmnet.runtime.observing import RunObserver
from swarmnet.runtime.text_codec import TOKENIZER, FileCodec, text_codec_of
from swarmnet.runtime.writing.chat import Message, chat_prompt
from swarmnet.runtime.writing.sampling import Sampling
from swarmnet.runtime.writing.writer import Text, Writer
from swarmnet.swarm.generation.remote_text import Tell
from swarmnet.training.models.model_folder import read_bounded
from swarmnet.training.tokenizer_files import (
    GENERATION_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
)

BESIDE = (TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, GENERATION_FILE)
"""Files that count where they lie beside a tokenizer that a person names."""


async def open_writer(
    observer: RunObserver, tokenizer: Path | None = None, *, exact: bool = True
) -> Writer:
    """By the tokenizer that a person named, or the run's. `exact`: as `Writer`. Raises
    `SwarmnetError`."""
    spec = observer.spec
    if tokenizer is None:
        files = await observer.fetch_files()
        codec = await asyncio.to_thread(text_codec_of, spec, files)
        if codec is None:
            name = Path(spec.data.tokenizer).name
            raise UserError(f"the run's tokenizer is a file: name it (--tokenizer {name})")
    else:
        beside = (tokenizer.with_name(name) for name in BESIDE)
        found = {p.name: read_bounded(p) for p in beside if p.is_file()}
        files = given(found | {TOKENIZER: read_bounded(tokenizer)})
        codec = await asyncio.to_thread(FileCodec, files)
    return await asyncio.to_thread(Writer, spec, observer.gossip, codec, files, exact=exact)


async def continue_text(
    writer: Writer, prompt: str, sampling: Sampling, tell: Tell, stops: Sequence[str] = ()
) -> Text:
    """A text that goes on with a prompt. Raises `SwarmnetError`."""
    tokens = await asyncio.to_thread(writer.codec.encode, prompt, adds_special=True)
    return writer.text(tokens, sampling, tell=tell, stops=stops)


async def answer(
    writer: Writer,
    messages: Sequence[Message],
    sampling: Sampling,
    tell: Tell,
    stops: Sequence[str] = (),
) -> Text:
    """A text that answers the last of some messages, by the model's chat template. Raises
    `SwarmnetError`."""
    prompted = await asyncio.to_thread(chat_prompt, writer.files, messages)
    tokens = await asyncio.to_thread(writer.codec.encode, prompted)
    return writer.text(tokens, sampling, tell=tell, stops=stops, is_answer=True)
