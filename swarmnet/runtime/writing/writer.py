"""Writes texts with the model of a run, as their pieces come."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence

import numpy as np

from swarmnet.errors import ProtocolViolation, UserError
from swarmnet.plurals import counted
from swarmnet.protocol.codecs import NONE
from swarmnet.protocol.generation import exact_pass_tokens, pass_tokens, text_tokens
from swarmnet.runtime.text_codec import TextCodec
from swarmnet.runtime.writing.pieces import Pieces
from swarmnet.runtime.writing.sampling import Sampling, choose, read_logits, sampling_of
from swarmnet.spec import RunSpec
from swarmnet.swarm.generation.remote_text import RemoteText, Tell
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.training.end_tokens import end_tokens, file_ends
from swarmnet.training.tokenizer_files import GENERATION_FILE, json_table

MAX_STOPS, MAX_STOP_CHARS = 8, 256
POSITIONS = "max_position_embeddings"


def longest_text(spec: RunSpec) -> int:
    """Tokens that a text of the run's model may have. Raises `UserError` where it writes none."""
    if spec.model.kind == "custom":
        raise UserError("this run trains a custom model: only language models write texts")
    most, of_model = text_tokens(spec.sequence_length), spec.model.config.get(POSITIONS)
    return min(most, of_model) if isinstance(of_model, int) and of_model else most


class Text:
    """One text; iterate over it for its pieces. `finish_reason` and the counts are known then."""

    def __init__(
        self,
        prompt: Sequence[int],
        remote: RemoteText,
        codec: TextCodec,
        ends: Sequence[int],
        sampling: Sampling,
        *,
        vocabulary: int,
        stops: Sequence[str] = (),
        is_answer: bool = False,
    ) -> None:
        """As `Writer.text`; `remote`: a new one. `vocabulary`: of the model."""
        self.finish_reason = ""
        """"stop" or "length"."""
        self.num_prompt_tokens = len(prompt)
        self.num_new_tokens = 0
        self._prompt = list(prompt)
        self._remote = remote
        self._codec = codec
        self._ends = frozenset(ends)
        self._sampling = sampling
        self.stops = tuple(stops)
        self._vocabulary = vocabulary
        self._before = () if is_answer else tuple(prompt)
        self._held = ""
        self._is_shown = list[bool]()
        """What has not been given, with special tokens as they are written; which characters of it
        are to be."""

    @property
    def round(self) -> int:
        """Whose parameters write it; known with the first piece."""
        return self._remote.round

    async def __aiter__(self) -> AsyncIterator[str]:
        """Pieces of text. Raises `SwarmnetError`."""
        rng = np.random.default_rng(self._sampling.seed)
        seen, new = set(self._prompt), self._prompt
        self.finish_reason = "length"
        try:
            # Another process reads the tokenizer: it may take its time.
            pieces = await asyncio.to_thread(Pieces, self._codec, self._before)
            while self.num_new_tokens < self._sampling.max_new_tokens:
                arrays = await self._remote.extend(new, self._sampling.num_logits(len(seen)))
                logits, of_tokens = read_logits(arrays, self._vocabulary)
                token = choose(logits, of_tokens, seen, self._sampling, rng)
                self.num_new_tokens += 1
                if token in self._ends:
                    self.finish_reason = "stop"
                    break
                new = [token]
                seen.add(token)
                piece, is_stopped = await asyncio.to_thread(self._piece, pieces, token)
                if piece:
                    yield piece
                if is_stopped:
                    self.finish_reason = "stop"
                    return
            piece, is_stopped = await asyncio.to_thread(self._piece, pieces, None)
            if is_stopped:
                self.finish_reason = "stop"
            if piece:
                yield piece
        finally:
            await self._remote.close()

    def _piece(self, pieces: Pieces, token: int | None) -> tuple[str, bool]:
        """What can be given once a token has come, None for the end, and whether the text ends with
        a stop. A stop may have special tokens in it, though no piece has."""
        if token is None:
            self._hold(pieces.rest())
        else:
            self._hold(pieces.push(token))
            self._hold(self._codec.special.get(token, ""), is_shown=False)
        found = [at for stop in self.stops if (at := self._held.find(stop)) >= 0]
        end = min(found, default=len(self._held))
        if not found and token is not None:
            end -= max((_begun(self._held, stop) for stop in self.stops), default=0)
        piece = "".join(itertools.compress(self._held[:end], self._is_shown))
        self._held, self._is_shown = self._held[end:], self._is_shown[end:]
        return piece, bool(found)

    def _hold(self, text: str, *, is_shown: bool = True) -> None:
        self._held += text
        self._is_shown += [is_shown] * len(text)


def _begun(text: str, stop: str) -> int:
    """Characters at the end of a text which `stop` may begin with."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class Writer:
    """Writes with the model of one run."""

    def __init__(
        self,
        spec: RunSpec,
        gossip: Gossip,
        codec: TextCodec,
        files: Mapping[str, bytes],
        *,
        exact: bool = True,
    ) -> None:
        """`files`: of the run, or beside the tokenizer that a person named. `exact`: activations go
        from stage to stage in fp32; else as the run codes them. Raises `UserError` where the run's
        model writes no texts."""
        self.codec = codec
        self.files = files
        self.sampling = sampling_of(json_table(files.get(GENERATION_FILE, b"")))
        """By the model's own files."""
        self._spec = spec
        self._gossip = gossip
        has_codes = spec.pipeline.codec != NONE and spec.pipeline.num_stages > 1
        self._exact = exact and has_codes
        self.longest = longest_text(spec)
        """Tokens that a text may have, with its prompt."""
        ends = file_ends(files)
        self._ends = end_tokens(spec, files, ends)
        self._next_turn = ends.next_turn
        self._names = itertools.count()

    def text(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        tell: Tell = lambda line: None,
        stops: Sequence[str] = (),
        is_answer: bool = False,
    ) -> Text:
        """A text that begins with these tokens. `stops`: it ends before the first of them; they may
        name special tokens. `is_answer`: it is a text of its own, to a prompt of a chat template,
        and goes on with none. `tell`: takes lines for people. Raises `UserError` where it would be
        too long."""
        if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise UserError(f"at most {MAX_STOPS} stops, of 1 to {MAX_STOP_CHARS} characters")
        vocabulary = self.vocabulary
        if not prompt:
            raise UserError("an empty prompt: give the model a text to go on with")
        if max(prompt) >= vocabulary:
            raise UserError("the tokenizer has more tokens than the run's model: it is another's")
        room = self.longest - len(prompt)
        if room < 1:
            raise UserError(
                f"the prompt has {counted(len(prompt), 'token')}; with the answer at most "
                f"{self.longest}"
            )
        pipeline = self._spec.pipeline
        microbatch_tokens = pipeline.microbatch * self._spec.sequence_length
        part_of = exact_pass_tokens if self._exact else pass_tokens
        sampling = sampling.with_options({"max_new_tokens": min(sampling.max_new_tokens, room)})
        remote = RemoteText(
            self._gossip,
            pipeline.num_stages,
            f"text {next(self._names)}",
            pass_tokens=part_of(microbatch_tokens),
            max_tokens=len(prompt) + sampling.max_new_tokens,
            check=functools.partial(read_logits, vocabulary=vocabulary),
            tell=tell,
            exact=self._exact,
        )
        if is_answer and self._next_turn:
            stops = (*stops, self._next_turn)
        return Text(
            prompt,
            remote,
            self.codec,
            self._ends,
            sampling,
            vocabulary=vocabulary,
            stops=stops,
            is_answer=is_answer,
        )

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        model = self._spec.model
        size = model.config.get("vocab_size") or model.vocab_size
        if not isinstance(size, int):
            raise ProtocolViolation("a model without a vocabulary")
        return size
