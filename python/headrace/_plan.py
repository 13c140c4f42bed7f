"""What a model's files hold, without loading it onto a device."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from headrace import _core
from headrace._catalog import resolve
from headrace._records import Record


@dataclass(frozen=True)
class TensorEntry(Record):
    """One tensor of a model."""

    name: str
    """Name in the file."""
    format: str
    """Storage format, such as `Q4_1` or `int4/32 f16`."""
    rows: int
    """Outputs."""
    cols: int
    """Inputs."""
    bytes: int
    """Bytes referenced."""
    order: int
    """Place in the order in which a step reads the weights, from 0."""
    file: str
    """File of the first extent."""
    offset: int
    """Offset of the first extent in that file."""


@dataclass(frozen=True)
class ModelSummary(Record):
    """What a model's files hold."""

    name: str
    container: str
    """`gguf` or `onnx`."""
    arch: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    """Context length that the file declares."""
    tied: bool
    """True if the output head is the embedding."""
    parameters: int
    weight_bytes: int
    """Bytes that tensors reference, each extent once."""
    step_bytes: int
    """Bytes of weights that one step reads."""
    file_bytes: int
    """Size of the files, of which some bytes may be referenced by nothing."""
    kv_token_bytes: int
    """KV bytes of one position with float16 entries."""
    tensors: tuple[TensorEntry, ...]
    """In read order."""


@dataclass(frozen=True)
class Plan(Record):
    """What a run of a model would read, and from where."""

    model: ModelSummary


def plan(model: str | os.PathLike[str]) -> Plan:
    """Reads a model's files and returns what a step would read.

    `model` is a GGUF file, a directory of the ONNX Runtime GenAI builder, or a name that `headrace.fetch` knows.
    Raises `ModelFormatError`, `UnsupportedModelError` or `OSError`.
    """
    return Plan(model=ModelSummary.from_dict(json.loads(_core.inventory(resolve(model)))))
