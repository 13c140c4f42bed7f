"""Placement modes on a real model: the same tokens, bytes read from where the plan says, refusals that tell what to do."""

from __future__ import annotations

from pathlib import Path

import headrace
import pytest
from conftest import golden

IDS = golden("gguf-q4_1-exact-fp64")["prompts"]["long"]["prompt_ids"][:40]
OPTIONS = {"device": "host-device", "max_context": 128, "max_batch": 1}


def tokens(engine: headrace.Engine) -> tuple[int, ...]:
    return engine.generate(IDS, max_new_tokens=8, stop_tokens=()).token_ids


def smallest(path: Path, **options: object) -> int:
    with pytest.raises(headrace.BudgetError) as error:
        headrace.Engine.load(path, vram_limit=1 << 20, **OPTIONS, **options)  # type: ignore[arg-type]
    return int(str(error.value).split("at least ")[1].split(" ")[0])


@pytest.fixture(scope="module", params=["gguf", "onnx"])
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue({"gguf": "smollm2", "onnx": "smollm2_onnx"}[request.param])
    return path


@pytest.fixture(scope="module")
def resident(model: Path) -> tuple[int, ...]:
    return tokens(headrace.Engine.load(model, device="cpu", max_context=128))


@pytest.mark.parametrize(
    ("mode", "budget"),
    [("resident", None), ("stream", None), ("zero-copy", "1GiB"), ("zero-copy", "20MB"), ("hybrid", "20MB"), ("auto", None)],
)
def test_every_mode_gives_the_same_tokens(
    model: Path, resident: tuple[int, ...], mode: str, budget: str | None
) -> None:
    limit = smallest(model, placement=mode, host_mapped_budget=budget)
    options = {"vram_limit": limit, "placement": mode, "host_mapped_budget": budget, **OPTIONS}
    engine = headrace.Engine.load(model, **options)  # type: ignore[arg-type]
    plan = headrace.plan(model, **options)  # type: ignore[arg-type]
    assert engine.plan == plan and plan.memory is not None
    for _ in range(2):
        engine.reset_stats()
        assert tokens(engine) == resident
    stats = engine.stats()
    assert stats.placement == plan.memory.placement
    assert stats.placement.asked_for == mode and stats.placement.mode != "auto"
    assert (plan.memory.host_mapped_bytes > 0) == (mode in ("zero-copy", "hybrid"))
    assert (plan.memory.streamed_bytes > 0) == (mode in ("stream", "hybrid", "auto"))
    # Eight steps; embedding rows come from the host in any mode, and KV grows at the cost of weights.
    in_place, streamed = stats.weights.host_mapped_bytes / 8, stats.weights.streamed_bytes / 8
    slack = 4 << 20
    assert plan.memory.host_mapped_bytes <= in_place <= plan.memory.host_mapped_bytes + slack
    assert plan.memory.streamed_bytes <= streamed <= plan.memory.streamed_bytes + slack
    places = {"resident": plan.memory.resident_bytes, "streamed": plan.memory.streamed_bytes}
    places["host-mapped"] = plan.memory.host_mapped_bytes
    for place, total in places.items():
        assert sum(p.bytes for p in plan.memory.pieces if p.place == place) == total
    (pool,) = stats.memory
    assert pool.limit == limit and pool.peak <= limit and pool.unaccounted == pool.unmanaged == 0


def test_unmanaged_enforces_nothing_and_says_so(smollm2: Path) -> None:
    engine = headrace.Engine.load(smollm2, placement="unmanaged", **OPTIONS)  # type: ignore[arg-type]
    assert tokens(engine) == tokens(headrace.Engine.load(smollm2, device="cpu", max_context=128))
    (pool,) = engine.stats().memory
    assert pool.unmanaged == sum(h.used for h in pool.holders) == pool.mapped > 0 == pool.used
    with pytest.raises(ValueError, match="unmanaged"):
        engine.set_vram_limit("1GiB")
    with pytest.raises(ValueError, match="unmanaged"):
        headrace.Engine.load(smollm2, placement="unmanaged", vram_limit="1GiB", **OPTIONS)  # type: ignore[arg-type]


def test_what_a_mode_cannot_do_is_refused(smollm2: Path) -> None:
    def load(**options: object) -> headrace.Engine:
        return headrace.Engine.load(smollm2, **{**OPTIONS, **options})  # type: ignore[arg-type]

    limit = smallest(smollm2, placement="stream")
    with pytest.raises(headrace.BudgetError, match="placement = stream"):
        load(placement="resident", vram_limit=limit)
    with pytest.raises(headrace.BudgetError, match="host_mapped_budget"):
        load(placement="zero-copy", vram_limit=limit, host_mapped_budget="1MiB")
    with pytest.raises(ValueError, match="host_mapped_budget"):
        load(placement="stream", host_mapped_budget="1MiB")
    with pytest.raises(ValueError, match="placement"):
        load(placement="hybrid", policy="lru")
    with pytest.raises(ValueError, match="placement"):
        load(device="cpu", placement="stream")
    with pytest.raises(ValueError, match="must be one of"):
        load(placement="somewhere")


def test_headroom_stays_free(smollm2: Path) -> None:
    limit = smallest(smollm2, placement="stream", headroom="8MiB")
    assert limit == smallest(smollm2, placement="stream") + (8 << 20)
    engine = headrace.Engine.load(smollm2, vram_limit=limit, headroom="8MiB", **OPTIONS)  # type: ignore[arg-type]
    tokens(engine)
    (pool,) = engine.stats().memory
    assert pool.limit == limit and pool.peak <= limit - (8 << 20)
    placement = engine.stats().placement
    assert placement is not None and placement.headroom == 8 << 20
