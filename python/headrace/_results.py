"""What generations return."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from headrace import _core
from headrace._arguments.kinds import made_by
from headrace._progress import GenerationProgress
from headrace._records import Record

if TYPE_CHECKING:
    from headrace._engine import Engine

FinishReason = Literal["stop", "length", "context", "cancelled"]


@dataclass(frozen=True)
class GenerationStats(Record):
    """Counts and times of one generation. Seconds are those of the whole steps that it took part in."""

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    """Steps that held rows of its prompt; the last of them gave the first token."""
    decode_seconds: float
    """Later steps."""
    decode_tokens: int
    """Tokens that the later steps gave: all but the first."""
    drafted_tokens: int = 0
    """Tokens of drafts, each verified in a step; 0 without `speculation`."""
    accepted_tokens: int = 0
    """Those of them that were right, and needed no step of their own."""

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens of the later steps over their time; 0 if there were none."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens over the time of their steps; 0 if there were none."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0


@dataclass(frozen=True)
class Generation(Record):
    """The result of `Engine.generate`."""

    text: str
    """What the new tokens say, special tokens left out."""
    token_ids: tuple[int, ...]
    """New tokens, without the stop token."""
    finish_reason: FinishReason
    """`stop`: a stop token was chosen; `length`: `max_new_tokens` were given; `context`: `max_context` is full;
    `cancelled`: the request was cancelled, and these are the tokens that it had."""
    stats: GenerationStats
    seed: int | None = None
    """The seed that its tokens were drawn with: given again, it gives them again. `None` where the choice was greedy."""
    logits: npt.NDArray[np.float32] | None = field(default=None, repr=False, compare=False)
    """`(choices, vocab)`: the logits of each choice, that of a stop token included, if `keep_logits` asked for them."""


@dataclass(frozen=True, eq=False)
class BatchResult(Record):
    """The result of `Engine.decode_greedy_batch`. Row `i` is what prompt `i` gives alone, bit for bit."""

    token_ids: npt.NDArray[np.int32]
    """`(prompts, longest)`: new tokens, filled up with -1."""
    lengths: npt.NDArray[np.int32]
    """`(prompts,)`: new tokens of each row."""
    finish_reasons: tuple[FinishReason, ...]
    """One for each row."""
    stats: tuple[GenerationStats, ...] = field(repr=False)
    """One for each row."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> list[int]:
        """New tokens of a row as a list."""
        return [int(t) for t in self.token_ids[row, : self.lengths[row]]]


def generation(row: _core._GenerationTuple, engine: Engine, seed: int | None) -> Generation:
    """The result of a generation as the core reports it, with its text."""
    text = engine.decode(row[0]) if engine._inner.has_tokenizer else ""
    return Generation(
        text=text, token_ids=tuple(row[0]), finish_reason=row[1], stats=generation_stats(row), seed=seed, logits=row[8]
    )


def generation_stats(row: _core._GenerationTuple) -> GenerationStats:
    """Its counts and times."""
    ids, _, prompt_tokens, prefill, decode, decode_tokens, drafted, accepted, _ = row
    return GenerationStats(
        prompt_tokens=prompt_tokens,
        new_tokens=len(ids),
        prefill_seconds=prefill,
        decode_seconds=decode,
        decode_tokens=decode_tokens,
        drafted_tokens=drafted,
        accepted_tokens=accepted,
    )


class Stream:
    """An iterator over the text of one generation, as it is made. Made by `Engine.stream`.

    Leaving it early, by `close()` or as a context manager, gives its memory back at once. A stream is for one thread at a time;
    `close()`, `token_ids` and `finish_reason` may be used from any.
    """

    def __init__(self, inner: _core.TokenStream, bars: GenerationProgress, seed: int | None) -> None:
        """Not for use: see `Engine.stream`."""
        made_by("Engine.stream(...)", inner, _core.TokenStream)
        self._inner = inner
        self._bars = bars
        self._seed = seed

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while True:
            try:
                text, _ = next(self._inner)
            finally:
                # The prompt is done, or nothing more comes: the bar makes room for the text.
                self._bars.stop()
            if text:
                return text

    def close(self) -> None:
        """Ends the generation: nothing more comes. While another thread waits for a piece, it ends once that step is over."""
        self._inner.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def seed(self) -> int | None:
        """The seed that its tokens are drawn with; `None` where the choice is greedy."""
        return self._seed

    @property
    def token_ids(self) -> list[int]:
        """New tokens so far, without the stop token."""
        return self._inner.token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; `None` while it goes on."""
        return self._inner.finish_reason
