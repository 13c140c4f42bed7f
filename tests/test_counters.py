"""Every counter of `stats()` is shown to count: a scenario makes each one something else than zero or empty, or the lists below say why none can here."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import headrace
import pytest
from conftest import DATA, ROOT

sys.path[:0] = [str(ROOT / "benches" / "gpu")]

import counters  # noqa: E402

MODEL = DATA / "models" / "qwen3-Q8_0.gguf"
OPTIONS: dict[str, Any] = {"device": "host-device", "max_context": 512, "max_batch": 2, "prefill_chunk": 16, "piece_bytes": "64KiB"}
REPEATING = [5, 6, 7, 8] * 6

ELSEWHERE: dict[str, tuple[str, str]] = {
    "weights.repacked_bytes": ("no small file here has a column-major matrix", "crates/ep-cpu/tests/refusals.rs"),
    "sources.pinned_copy_bytes": ("only where a card's driver or the ledger refuses to register a file", "crates/ep-cuda/src/upload_tests.rs"),
    "device.fallbacks": ("only where something is refused to a card", "crates/engine/tests/gpu_failures.rs"),
    "clock.link_ceiling": ("the host device has a link with a ceiling only where a test gives it one", "crates/engine/tests/clock.rs"),
    "clock.link_utilisation": ("as the link's ceiling", "crates/engine/tests/clock.rs"),
    "clock.broken_instruments": ("must be empty; the test of the clock breaks an instrument", "crates/engine/src/stats/clock.rs"),
    "memory.oversubscribed": ("must be 0; the ledger's test charges beyond a limit", "crates/memory-governor/src/ledger.rs"),
    "memory.underflows": ("must be 0; the ledger's test releases twice", "crates/memory-governor/src/ledger.rs"),
    "memory.unaccounted": ("must be 0; a rule's test maps more than is charged", "crates/memory-governor/tests/rules.rs"),
    "memory.physical.unaccounted": ("as that of the pool", "crates/memory-governor/tests/rules.rs"),
}
"""Counters that no scenario here moves: why, and the file of Rust whose tests do."""

NOT_SHOWN: dict[str, str] = {
    "sources.bounced_bytes": "needs a card whose driver refuses pinning in a load; no script makes it count yet",
    "sources.refusals": "needs a card whose driver refuses to register a file; no script makes it count yet",
    "graph.dropped": "needs graphs on a card that take more than is set aside for them; no script makes it count yet",
}
"""What is owed."""

NEVER: dict[str, str] = {
    "kv.growth_moved_bytes": "0 by construction: growth maps pages and moves none",
    "graph.fallbacks": "no device has another way to run a step, so far; a device that gets one counts it here",
    "graph.fallback_reasons": "as fallbacks",
}


def leaves(record: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every counter with its value, by path; several records of one kind have one path."""
    for field in dataclasses.fields(record):
        value, name = getattr(record, field.name), f"{path}.{field.name}".lstrip(".")
        inner = str(field.type).removesuffix(" | None").removeprefix("tuple[").removesuffix(", ...]")
        if dataclasses.is_dataclass(value):
            yield from leaves(value, name)
        elif not value and dataclasses.is_dataclass(getattr(headrace, inner, None)):
            continue
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            for each in value:
                yield from leaves(each, name)
        else:
            yield name, value


def smallest(path: Path, **options: Any) -> int:
    with pytest.raises(headrace.BudgetError) as error:
        headrace.Engine.load(path, vram_limit=1, **options)
    return int(str(error.value).split("at least ")[1].split(" ")[0])


def cpu() -> headrace.Stats:
    engine = headrace.Engine.load(MODEL, device="cpu", max_context=512)
    engine.generate(REPEATING, max_new_tokens=40, stop_tokens=(), speculation=4)
    return engine.stats()


def chosen() -> headrace.Stats:
    """`auto`: what was asked for is named where it is something else."""
    return headrace.Engine.load(MODEL, device="auto", max_context=512).stats()


def streamed() -> headrace.Stats:
    """Weights through the ring, KV that grows, steps in flight that are discarded."""
    engine = headrace.Engine.load(MODEL, vram_limit=smallest(MODEL, **OPTIONS), steps_in_flight=2, **OPTIONS)
    tokens = engine.generate([1, 2, 3], max_new_tokens=400, stop_tokens=()).token_ids
    engine.generate([1, 2, 3], max_new_tokens=20, stop_tokens=(tokens[5],))
    return engine.stats()


def live() -> headrace.Stats:
    """While a sequence lives."""
    engine = headrace.Engine.load(MODEL, **OPTIONS)
    with engine.stream([1, 2, 3], max_new_tokens=8, stop_tokens=()) as stream:
        next(stream)
        return engine.stats()


def in_place() -> headrace.Stats:
    options = OPTIONS | {"placement": "hybrid", "host_mapped_budget": "128KiB", "headroom": "1MiB"}
    engine = headrace.Engine.load(MODEL, vram_limit=smallest(MODEL, **options), **options)
    engine.generate([1, 2, 3], max_new_tokens=4, stop_tokens=())
    return engine.stats()


def policy(name: str) -> headrace.Stats:
    options = OPTIONS | {"policy": name}
    engine = headrace.Engine.load(MODEL, vram_limit=smallest(MODEL, **options) + (512 << 10), policy_budget="192KiB", **options)
    engine.generate([1, 2, 3], max_new_tokens=6, stop_tokens=())
    return engine.stats()


def unmanaged() -> headrace.Stats:
    engine = headrace.Engine.load(MODEL, placement="unmanaged", **OPTIONS)
    engine.generate([1, 2, 3], max_new_tokens=2, stop_tokens=())
    return engine.stats()


SCENARIOS: dict[str, Callable[[], headrace.Stats]] = {
    "cpu": cpu, "auto": chosen, "streamed": streamed, "live": live, "in place": in_place, "lru": lambda: policy("lru"),
    "mru": lambda: policy("mru"), "static": lambda: policy("static"), "unmanaged": unmanaged,
}  # fmt: skip


@pytest.fixture(scope="module")
def moved() -> dict[str, set[str]]:
    """By counter the scenarios that moved it."""
    found: dict[str, set[str]] = {}
    for name, scenario in SCENARIOS.items():
        stats = scenario()
        if stats.device.name.startswith("cuda"):
            # Where there is a card, `auto` gets what it asks for: nothing to name.
            found.setdefault("device.asked_for", set()).add("a card")
            continue
        for counter, value in leaves(stats):
            found.setdefault(counter, set())
            if value:
                found[counter].add(name)
    return found


def test_every_counter_is_moved_by_a_scenario_or_listed_with_the_reason(moved: dict[str, set[str]]) -> None:
    never = {counter for counter, scenarios in moved.items() if not scenarios}
    listed = {*counters.ON_A_CARD, *ELSEWHERE, *NEVER, *NOT_SHOWN}
    assert never - listed == set(), "no scenario moves these"
    assert listed - never == set(), "these need no exception: a scenario moves them"


def test_what_the_lists_name_exists() -> None:
    for counter, (reason, where) in ELSEWHERE.items():
        assert reason and counter.rpartition(".")[2] in (ROOT / where).read_text(encoding="utf-8"), f"{where} doesn't show {counter}"
    for counter, (reason, where) in counters.ON_A_CARD.items():
        assert reason and where in counters.SCENARIOS, f"nothing shows {counter}"
