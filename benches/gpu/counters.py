"""Shows the counters that only a card moves: `python benches/gpu/counters.py`. Exits with 1 if one of them stays 0.

A test compares the list with the counters that no scenario without a card moves.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import headrace
import make_model
from instruments import sound
from run import limits_of

SMALL = make_model.Shape(4, 1024, 4096, 16, 8, 1024)
BASE: dict[str, Any] = {"max_context": 256, "max_batch": 1, "prefill_chunk": 64, "piece_bytes": "1MiB"}

ON_A_CARD: dict[str, tuple[str, str]] = {
    "sources.registered_bytes": ("a file's mapping is registered with the driver", "streamed"),
    "sources.pinned_bytes": ("host memory is page-locked for the card", "streamed"),
    "graph.bytes": ("graphs take memory of the card", "streamed"),
    "clock.memory_ceiling": ("the driver says the memory's clock and width", "streamed"),
    "graph.eager_ops": ("a policy's small programs are launched outside graphs on a card", "policy"),
}
"""Counters: why only a card moves them, and the scenario below that does."""


def streamed(path: Path) -> headrace.Stats:
    """Half of what is cold at the smallest limit."""
    minimum, everything = limits_of(path, **BASE)
    engine = headrace.Engine.load(path, device="cuda", vram_limit=(minimum + everything) // 2, **BASE)
    engine.generate([1, 2, 3], max_new_tokens=24, stop_tokens=())
    return sound(engine)


def policy(path: Path) -> headrace.Stats:
    """A residency policy that evicts."""
    minimum, everything = limits_of(path, policy="lru", **BASE)
    engine = headrace.Engine.load(path, device="cuda", vram_limit=(minimum + everything) // 2, policy="lru", **BASE)
    engine.generate([1, 2, 3], max_new_tokens=4, stop_tokens=())
    return sound(engine)


SCENARIOS: dict[str, Callable[[Path], headrace.Stats]] = {"streamed": streamed, "policy": policy}


def main() -> None:
    still = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "small"
        make_model.build(SMALL, path, 1)
        for name, scenario in SCENARIOS.items():
            stats = scenario(path)
            for counter, (_, where) in ON_A_CARD.items():
                if where == name:
                    record, field = counter.split(".")
                    value = getattr(getattr(stats, record), field)
                    print(f"{counter} = {value}", flush=True)
                    still += [] if value else [counter]
    sys.exit(f"still 0: {', '.join(still)}" if still else 0)


if __name__ == "__main__":
    main()
