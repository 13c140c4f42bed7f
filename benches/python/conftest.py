"""What the timings share: the demo model, and engines on the devices that every machine has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import headrace
import pytest

OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    # A limit under which half of the weights are streamed.
    "host-device": {"device": "host-device", "vram_limit": "100MiB", "piece_bytes": "1MiB"},
}
COMMON: dict[str, Any] = {"threads": 2, "max_context": 256, "max_batch": 4, "prefill_chunk": 64}


@pytest.fixture(scope="session")
def model() -> Path:
    """The demo model, fetched once into the user's cache."""
    return headrace.fetch("smollm2-135m")


@pytest.fixture(scope="session", params=list(OPTIONS))
def device(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of `Engine.load`, for each device."""
    return COMMON | OPTIONS[request.param]


@pytest.fixture(scope="session")
def engine(model: Path, device: dict[str, Any]) -> Iterator[headrace.Engine]:
    """An engine on each device."""
    yield headrace.Engine.load(model, **device)
