"""Copies of model files with one thing changed, for tests of what files may lack or say wrongly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter


def gguf_text(source: Path, key: str) -> str:
    """A text of a GGUF file's metadata."""
    return str(GGUFReader(source).fields[key].contents())


def rewrite_gguf(
    source: Path,
    target: Path,
    *,
    values: dict[str, tuple[GGUFValueType, Any]] | None = None,
    keep_key: Callable[[str], bool] = lambda key: True,
    keep_tensor: Callable[[str], bool] = lambda name: True,
) -> Path:
    """Copies a GGUF file with `values` set, without the keys and tensors that aren't kept. Returns `target`."""
    reader, values = GGUFReader(source), values or {}
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in values or not keep_key(key):
            continue
        array = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(key, field.contents(), field.types[0], field.types[1] if array else None)
    for key, (kind, value) in values.items():
        writer.add_key_value(key, value, kind)
    for tensor in reader.tensors:
        if keep_tensor(tensor.name):
            plain = tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=None if plain else tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def rewrite_json(source: Path, target: Path, file: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copies a model directory with one of its JSON files changed. Returns `target`."""
    shutil.copytree(source, target)
    content = json.loads((target / file).read_text())
    change(content)
    (target / file).write_text(json.dumps(content))
    return target
