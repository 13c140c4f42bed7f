"""Types of the compiled module. Private: use the package `headrace`."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias, final

import numpy as np
import numpy.typing as npt

__all__ = [
    "BudgetError",
    "ContextLengthError",
    "DeviceError",
    "Engine",
    "HeadraceError",
    "ModelFormatError",
    "NonFiniteError",
    "TokenStream",
    "UnsupportedModelError",
    "build_info",
    "inventory",
]

_GenerationTuple: TypeAlias = tuple[list[int], Literal["stop", "length", "context"], int, float, float, int]

class HeadraceError(Exception): ...
class ModelFormatError(HeadraceError): ...
class UnsupportedModelError(HeadraceError): ...
class BudgetError(HeadraceError): ...
class ContextLengthError(HeadraceError): ...
class DeviceError(HeadraceError): ...
class NonFiniteError(HeadraceError): ...

def build_info() -> dict[str, str]: ...
def inventory(path: str | os.PathLike[str]) -> str: ...
@final
class Engine:
    @staticmethod
    def load(
        path: str | os.PathLike[str],
        *,
        device: str,
        max_context: int | None,
        max_batch: int,
        prefill_chunk: int,
        activations: str,
        kv_dtype: str,
        kv_layout: str,
        threads: int | None,
    ) -> Engine: ...
    def encode(self, text: str, *, add_special: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str: ...
    def apply_chat_template(self, messages: Sequence[tuple[str, str]], *, add_generation_prompt: bool) -> str: ...
    @property
    def has_chat_template(self) -> bool: ...
    @property
    def has_tokenizer(self) -> bool: ...
    @property
    def eos_token_ids(self) -> list[int]: ...
    @property
    def max_context(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int | None,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int,
        stop_tokens: Sequence[int],
        progress: Callable[[int, int, int], None] | None,
    ) -> _GenerationTuple: ...
    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int | None,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int,
        stop_tokens: Sequence[int],
    ) -> TokenStream: ...
    def decode_greedy_batch(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_tokens: Sequence[int],
        progress: Callable[[int, int, int], None] | None,
    ) -> list[_GenerationTuple]: ...
    def logits(self, sequences: Sequence[Sequence[int]], *, last_only: bool) -> npt.NDArray[np.float32]: ...
    def inventory(self) -> str: ...
    def stats(self) -> str: ...
    def reset_stats(self) -> None: ...

@final
class TokenStream:
    def __iter__(self) -> Iterator[tuple[str, int | None]]: ...
    def __next__(self) -> tuple[str, int | None]: ...
    def close(self) -> None: ...
    @property
    def finish_reason(self) -> Literal["stop", "length", "context"] | None: ...
    @property
    def token_ids(self) -> list[int]: ...
