"""A real model under limits from the smallest that works to one that holds everything: the same tokens, exact books."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import headrace
import pytest
from conftest import golden

LONG = golden("gguf-q4_1-exact-fp64")["prompts"]["long"]["prompt_ids"]
PROMPTS = [LONG[:1], LONG[:40], LONG[:400]]
NEW_TOKENS = 8
CONTEXT = 448


def generate(engine: headrace.Engine) -> list[tuple[int, ...]]:
    return [engine.generate(p, max_new_tokens=NEW_TOKENS, stop_tokens=()).token_ids for p in PROMPTS]


def load(path: Path, **options: object) -> headrace.Engine:
    return headrace.Engine.load(path, device="host-device", max_context=CONTEXT, max_batch=2, **options)  # type: ignore[arg-type]


def memory_plan(path: Path) -> headrace.MemoryPlan:
    plan = headrace.plan(path, device="host-device", vram_limit="1TiB", max_context=CONTEXT, max_batch=2)
    assert plan.memory is not None
    return plan.memory


def limits(path: Path) -> list[int]:
    """Six limits: the smallest that works, four between, and the one from which on nothing is streamed."""
    everything = memory_plan(path).everything
    minimum = smallest(path)
    return [minimum + (everything - minimum) * i // 5 for i in range(6)]


def smallest(path: Path) -> int:
    """The smallest limit, as the error of a limit that is too small gives it away; it names every part."""
    with pytest.raises(headrace.BudgetError) as error:
        load(path, vram_limit=1 << 20)
    text = str(error.value)
    for part in ("fixed", "workspace", "kv", "staging", "missing"):
        assert part in text
    needed = text.split("at least ")[1].split(" ")[0]
    return int(needed)


def check_books(engine: headrace.Engine, limit: int) -> None:
    (pool,) = engine.stats().memory
    assert pool.limit == limit
    assert pool.peak <= limit and pool.mapped_peak <= limit
    assert pool.unaccounted == 0 and pool.oversubscribed == 0 and pool.underflows == 0
    assert pool.used == sum(h.used for h in pool.holders) == pool.mapped
    (physical,) = pool.physical
    assert (physical.source, physical.bytes, physical.peak) == ("map-count", pool.mapped, pool.mapped_peak)
    fixed = next(h.used for h in pool.holders if h.name == "fixed")
    parts = dict(pool.fixed_parts)
    assert sum(parts.values()) == fixed and parts["vectors"] > 0 and parts["rotary tables"] > 0


@pytest.fixture(scope="module", params=["gguf", "onnx"])
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue({"gguf": "smollm2", "onnx": "smollm2_onnx"}[request.param])
    return path


@pytest.fixture(scope="module")
def resident(model: Path) -> list[tuple[int, ...]]:
    """What the CPU says, weights in place."""
    return generate(headrace.Engine.load(model, device="cpu", max_context=CONTEXT))


@pytest.mark.parametrize("device", ["cpu", "host-device"])
def test_a_load_says_what_it_was_spent_on(smollm2: Path, device: Literal["cpu", "host-device"]) -> None:
    start = time.monotonic()
    engine = headrace.Engine.load(smollm2, device=device, max_context=CONTEXT)
    seconds = time.monotonic() - start
    spent = engine.stats().time
    parts = ["files", "device", "attach", "kernels", "plan", "weights", "pages"]
    if device == "cpu":
        parts = [part for part in parts if part not in ("kernels", "weights")]
    assert [part for part, _ in spent.load_parts] == parts
    assert all(part >= 0 for _, part in spent.load_parts)
    assert sum(part for _, part in spent.load_parts) == pytest.approx(spent.load_seconds)
    # Nothing of the load is left out.
    assert 0.5 * seconds < spent.load_seconds <= seconds
    engine.reset_stats()
    assert engine.stats().time.load_parts == spent.load_parts


@pytest.mark.parametrize("layout", ["head-major", "seq-major"])
@pytest.mark.parametrize("step", range(6))
def test_every_limit_gives_the_same_tokens(
    model: Path, resident: list[tuple[int, ...]], step: int, layout: str
) -> None:
    limit = limits(model)[step]
    engine = load(model, vram_limit=limit, kv_layout=layout)
    checksums = engine.weight_checksums()
    for _ in range(2):
        engine.reset_stats()
        assert generate(engine) == resident
        stats = engine.stats()
        assert (stats.weights.streamed_bytes > 0) == (step < 5)
        assert stats.graph.replays == stats.tokens.steps and stats.graph.eager_ops == stats.graph.fallbacks == 0
        assert stats.graph.captures >= sum(count for _, count in stats.graph.epochs)
        assert stats.graph.live >= 1 and stats.graph.nodes > 0
        check_books(engine, limit)
        for before, now in zip(checksums, engine.weight_checksums(), strict=True):
            assert before is None or now is None or before == now
    assert stats.kv.growth_moved_bytes == 0


def test_a_limit_below_the_smallest_is_refused_and_the_smallest_works(smollm2: Path) -> None:
    minimum = smallest(smollm2)
    with pytest.raises(headrace.BudgetError, match="missing"):
        load(smollm2, vram_limit=minimum - 1)
    assert load(smollm2, vram_limit=minimum).generate([1, 2], max_new_tokens=2, stop_tokens=()).token_ids


def test_kv_takes_bytes_from_the_weights_and_gives_them_back(smollm2: Path) -> None:
    """A limit that holds everything while KV is small: it fills up, and a sequence still reaches its context."""
    memory = memory_plan(smollm2)
    limit = memory.everything - memory.kv_max_bytes * 3 // 4
    expected = headrace.Engine.load(smollm2, device="cpu", max_context=CONTEXT)
    engine = load(smollm2, vram_limit=limit)
    assert engine.plan.memory is not None and engine.plan.memory.streamed_bytes == 0
    prompt, new = LONG[:20], CONTEXT - 20
    tokens = engine.generate(prompt, max_new_tokens=new, stop_tokens=()).token_ids
    assert tokens == expected.generate(prompt, max_new_tokens=new, stop_tokens=()).token_ids
    stats = engine.stats()
    epochs = dict(stats.graph.epochs)
    assert 1 <= epochs["kv-growth"] <= 12
    assert stats.weights.streamed_bytes > 0
    check_books(engine, limit)
    # Two short generations later the weights have their bytes back.
    for _ in range(3):
        engine.generate([1, 2, 3], max_new_tokens=2, stop_tokens=())
    assert engine.plan.memory is not None and engine.plan.memory.streamed_bytes == 0
    assert dict(engine.stats().graph.epochs)["kv-shrink"] >= 1
    check_books(engine, limit)


def test_the_limit_of_a_live_engine_can_be_changed(smollm2: Path) -> None:
    low, *_, high = limits(smollm2)
    engine = load(smollm2, vram_limit=high)
    expected = generate(engine)
    engine.set_vram_limit(low)
    assert engine.plan.memory is not None and engine.plan.memory.limit == low
    assert engine.plan.memory.streamed_bytes > 0
    assert generate(engine) == expected
    engine.reset_stats()
    check_books(engine, low)
    with pytest.raises(headrace.BudgetError):
        engine.set_vram_limit(low - 1)
    assert generate(engine) == expected
    engine.set_vram_limit(high)
    assert engine.plan.memory is not None and engine.plan.memory.streamed_bytes == 0
    assert generate(engine) == expected
    with pytest.raises(ValueError, match="vram_limit"):
        headrace.Engine.load(smollm2, device="cpu").set_vram_limit("1GiB")


def test_the_plan_is_what_the_engine_does(smollm2: Path) -> None:
    limit = limits(smollm2)[2]
    plan = headrace.plan(smollm2, device="host-device", vram_limit=limit, max_context=CONTEXT, max_batch=2)
    engine = load(smollm2, vram_limit=limit)
    assert plan.memory is not None and engine.plan == plan
    engine.generate([1], max_new_tokens=1, stop_tokens=())
    engine.reset_stats()
    engine.generate([1, 2, 3], max_new_tokens=5, stop_tokens=())
    assert engine.stats().weights.streamed_bytes == 5 * plan.memory.streamed_bytes
    assert engine.stats().weights.resident_bytes_read == 5 * plan.memory.resident_bytes


def test_the_trade_is_what_batches_do(smollm2: Path) -> None:
    """Streamed bytes a token fall with the number of sequences as planned, KV taking room from the weights."""
    options = {"max_context": CONTEXT, "max_batch": 8, "prefill_chunk": 64}
    with pytest.raises(headrace.BudgetError) as error:
        headrace.Engine.load(smollm2, device="host-device", vram_limit=1, **options)
    limit = int(str(error.value).split("at least ")[1].split(" ")[0]) + (30 << 20)
    length = 64
    trade = headrace.plan(smollm2, device="host-device", vram_limit=limit, length=length, **options).trade
    assert trade is not None and trade.length == length
    assert [row.sequences for row in trade.rows] == [1, 2, 4, 8] and trade.largest == 8
    for row in trade.rows:
        engine = headrace.Engine.load(smollm2, device="host-device", vram_limit=limit, steps_in_flight=1, **options)
        assert engine.trade(length) == trade
        before = engine.stats()
        new = 8
        prompts = [[i + 3] * (length - new) for i in range(row.sequences)]
        with engine.serve() as server:
            requests = [server.submit(p, max_new_tokens=new, stop_tokens=()) for p in prompts]
            assert all(len(r.result().token_ids) == new for r in requests)
        # Steps that held prompt rows read the weights as well: the last steps are those of all sequences.
        stats = engine.stats()
        per_step = (stats.weights.streamed_bytes - before.weights.streamed_bytes) / stats.tokens.steps
        assert per_step == pytest.approx(row.streamed_bytes, rel=0.05)
        assert stats.weights.streamed_bytes_per_token == stats.weights.streamed_bytes / stats.tokens.emitted
        assert stats.kv.largest_batch <= stats.kv.max_pages
    assert trade.rows[1].streamed_bytes_per_token < 0.53 * trade.rows[0].streamed_bytes_per_token


def test_sizes_are_parsed(smollm2: Path) -> None:
    from headrace._sizes import Share, read_size

    assert read_size("8GiB") == 8 << 30 and read_size("1.5 MB") == 1_500_000 and read_size("7") == 7
    half = read_size("50%")
    assert isinstance(half, Share) and half.of(1000) == 500
    for bad in ("8 apples", "", "-1", "1e9"):
        assert read_size(bad) is None
    with pytest.raises(ValueError, match="vram_limit"):
        headrace.Engine.load(smollm2, device="cpu", vram_limit="1GiB")
