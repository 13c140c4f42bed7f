"""The header of a benchmark's JSON: which commit, build, card, driver and command its figures are of.

    python benches/header.py docs/benchmarks

lists the headers of a folder's files as the table of `docs/benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIELDS = ("commit", "build", "card", "driver", "command")
UNKNOWN = "unknown: "
"""What begins a field that can't be told; the reason follows."""
NONE = "none: "
"""What begins the fields `card` and `driver` of a run without a card."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What a benchmark's command line takes for its header."""
    parser.add_argument("--commit", help="commit that was built, for the header; by default what git says of this checkout")


def header(device: str, commit: str | None = None) -> dict[str, Any]:
    """The header of a run on `device` (`cuda`, `cuda:0`, `host-device`, `cpu`), by this process's build and command line."""
    import headrace

    card, driver = _card(device)
    build = headrace.build_info()
    if build["debug_assertions"] == "on" or build["profile"] != "release":
        print(f"NOT A RELEASE BUILD: {build}; such figures don't belong in the README", file=sys.stderr, flush=True)
    return {"commit": commit or _commit(), "build": build, "card": card, "driver": driver, "command": _command()}


def faults(head: Any) -> list[str]:
    """What is missing or wrong in a header, in words."""
    if not isinstance(head, dict) or set(head) != set(FIELDS):
        return [f"the header must have {', '.join(FIELDS)}, and has {sorted(head) if isinstance(head, dict) else head!r}"]
    found = []
    for name in FIELDS:
        value = head[name]
        if name == "build" and isinstance(value, dict):
            found += [f"build.{key} is missing" for key in ("version", "profile", "debug_assertions") if not value.get(key)]
        elif not isinstance(value, str):
            found.append(f"{name} = {value!r}: must be a text")
        elif value.startswith((UNKNOWN, NONE)):
            if len(value.split(": ", 1)[1]) < 8:
                found.append(f"{name} = {value!r}: gives no reason")
        elif name == "commit" and not re.fullmatch(r"[0-9a-f]{7,40}(\+changes)?(, [0-9a-f]{7,40})*", value):
            found.append(f"commit = {value!r}: must be one, or begin with {UNKNOWN!r}")
        elif name == "build" or not value.strip():
            found.append(f"{name} = {value!r}: must be known, or begin with {UNKNOWN!r}")
    return found


def is_release(head: dict[str, Any]) -> bool:
    """True if the figures are of a release build without debug assertions, by the header's word."""
    build = head["build"]
    return isinstance(build, dict) and build["profile"] == "release" and build["debug_assertions"] == "off"


def table(folder: Path) -> str:
    """The headers of all JSON files of a folder, as a table."""
    lines = ["| file | commit | build | card, driver | not known |", "| --- | --- | --- | --- | --- |"]
    for path in sorted(folder.rglob("*.json")):
        head = json.loads(path.read_text(encoding="utf-8"))["header"]
        build = head["build"]
        if isinstance(build, str):
            kind = "unknown"
        else:
            kind = "release" if is_release(head) else f"**{build['profile']}, debug assertions {build['debug_assertions']}**"
        plain = {name: "" if str(head[name]).startswith(UNKNOWN) else str(head[name]) for name in ("commit", "card", "driver")}
        card = "none" if plain["card"].startswith(NONE) else ", ".join(filter(None, (plain["card"], plain["driver"]))) or "unknown"
        missing = [f"{name} ({head[name].removeprefix(UNKNOWN)})" for name in FIELDS if str(head[name]).startswith(UNKNOWN)]
        if isinstance(build, dict):
            missing += [f"build.{key}" for key, value in sorted(build.items()) if str(value).startswith(UNKNOWN)]
        lines.append(f"| `{path.relative_to(folder)}` | {plain['commit'] or 'unknown'} | {kind} | {card} | {'; '.join(missing)} |")
    return "\n".join(lines)


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=7", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN + "there was no git checkout where it ran, and no --commit"


def _card(device: str) -> tuple[str, str]:
    """Name and driver of the first card; of none where the device isn't one."""
    if not device.startswith("cuda"):
        return (NONE + f"computed on {device}",) * 2
    question = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(question, capture_output=True, text=True, check=True)
        card, driver = done.stdout.splitlines()[0].rsplit(", ", 1)
        return card, driver
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError) as error:
        return (UNKNOWN + f"nvidia-smi gave no answer ({type(error).__name__})",) * 2


def _command() -> str:
    """The command line, without the folders of this machine before the script's own."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", str(name), *sys.argv[1:]])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {__doc__}")
    print(table(Path(sys.argv[1])))
