"""The residency policies: control arms that may move more bytes than the static schedule, and never change a token."""

from __future__ import annotations

import pickle
from pathlib import Path

import headrace
import pytest
from conftest import golden
from headrace._arguments.tables import POLICIES, Policy

PROMPT = golden("gguf-q4_1-exact-fp64")["prompts"]["long"]["prompt_ids"][:40]
NEW_TOKENS = 6
CONTEXT = 128
Tokens = tuple[int, ...]


def load(path: Path, limit: int, policy: Policy | None, **options: object) -> headrace.Engine:
    return headrace.Engine.load(
        path,
        device="host-device",
        vram_limit=limit,
        max_context=CONTEXT,
        max_batch=1,
        prefill_chunk=64,
        policy=policy,
        **options,  # type: ignore[arg-type]
    )


def generate(engine: headrace.Engine) -> Tokens:
    return engine.generate(PROMPT, max_new_tokens=NEW_TOKENS, stop_tokens=()).token_ids


def check_books(engine: headrace.Engine, limit: int) -> None:
    (pool,) = engine.stats().memory
    assert pool.peak <= limit and pool.mapped_peak <= limit
    assert pool.unaccounted == 0 and pool.oversubscribed == 0 and pool.underflows == 0


@pytest.fixture(scope="module")
def resident(smollm2: Path) -> Tokens:
    """What a run says in which everything is resident."""
    return generate(headrace.Engine.load(smollm2, device="cpu", max_context=CONTEXT))


@pytest.fixture(scope="module")
def memory(smollm2: Path) -> headrace.MemoryPlan:
    plan = headrace.plan(
        smollm2, device="host-device", vram_limit="1TiB", max_context=CONTEXT, max_batch=1, prefill_chunk=64
    ).memory
    assert plan is not None
    return plan


@pytest.fixture(scope="module")
def limits(memory: headrace.MemoryPlan) -> list[int]:
    """Limits under which about a quarter and about half of the weights stay."""
    rest = memory.everything - memory.resident_bytes
    return [rest + 8 * 1024 * 1024 + memory.resident_bytes * share // 4 for share in (1, 2)]


def lm_head(path: Path) -> str:
    """Name of the head: the last tensor that a step reads."""
    plan = headrace.plan(path, device="host-device", vram_limit="1TiB", max_context=CONTEXT, max_batch=1)
    assert plan.memory is not None
    return plan.memory.pieces[-1].tensors[-1][0]


def steady_bytes(engine: headrace.Engine, resident: Tokens) -> float:
    """Bytes that a step of the second generation streams; the first one has filled the cache, or the ring."""
    assert generate(engine) == resident
    checksums = engine.weight_checksums()
    engine.reset_stats()
    assert generate(engine) == resident
    for before, now in zip(checksums, engine.weight_checksums(), strict=True):
        assert before is None or now is None or before == now
    stats = engine.stats()
    assert stats.weights.streamed_bytes > 0 and stats.tokens.steps == NEW_TOKENS
    return stats.weights.streamed_bytes / stats.tokens.steps


@pytest.fixture(scope="module")
def schedule(smollm2: Path, limits: list[int], resident: Tokens) -> list[float]:
    """Bytes that a step of the static schedule streams, for each limit."""
    return [steady_bytes(load(smollm2, limit, None), resident) for limit in limits]


@pytest.mark.parametrize("which", [0, 1], ids=["quarter", "half"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_same_tokens_and_moves_no_fewer_bytes(
    smollm2: Path, limits: list[int], resident: Tokens, schedule: list[float], policy: Policy, which: int
) -> None:
    limit = limits[which]
    engine = load(smollm2, limit, policy)
    assert steady_bytes(engine, resident) >= schedule[which]
    check_books(engine, limit)
    w = engine.stats().weights
    trace = engine.residency_trace()
    assert sum(t.reads for t in trace) == w.hits + w.page_ins
    assert sum(t.page_ins for t in trace) == w.page_ins
    assert sum(t.page_in_bytes for t in trace) == w.streamed_bytes
    assert sum(t.read_bytes for t in trace) == w.streamed_bytes + w.resident_bytes_read
    assert sum(t.bypassed for t in trace) == w.bypassed_page_ins
    assert sum(t.bypassed_bytes for t in trace) == w.bypassed_bytes
    assert sum(t.evictions for t in trace) == w.evictions
    assert all(t.retained + t.bypassed == t.page_ins for t in trace)
    if policy == "lru":
        assert w.hits == 0 and w.bypassed_page_ins == 0
    if policy in ("static", "stable"):
        assert w.evictions == 0 and w.bypassed_page_ins == w.page_ins and w.bypassed_share == 1.0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_other_kv_layout_changes_nothing(
    smollm2: Path, limits: list[int], resident: Tokens, policy: Policy
) -> None:
    engine = load(smollm2, limits[1], policy, kv_layout="seq-major")
    assert steady_bytes(engine, resident) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_pinning_the_head_alone_changes_nothing(
    smollm2: Path, memory: headrace.MemoryPlan, resident: Tokens, policy: Policy
) -> None:
    """One large tensor stays across steps and generations; the others come and go around it."""
    head = lm_head(smollm2)
    size = sum(p.bytes for p in memory.pieces if p.tensors[-1][0] == head)
    limit = memory.everything - memory.resident_bytes + 8 * 1024 * 1024 + size + size // 8
    engine = load(smollm2, limit, policy, pinned=[head])
    assert generate(engine) == resident
    first = engine.weight_checksums()
    for _ in range(2):
        engine.reset_stats()
        assert generate(engine) == resident
        trace = {t.name: t for t in engine.residency_trace()}
        assert trace[head].pinned and trace[head].page_ins == 0 and trace[head].reads > 0
        assert [name for name, t in trace.items() if t.pinned] == [head]
        assert trace[head].resident_pieces == trace[head].pieces
        now = engine.weight_checksums()
        assert all(a == b for a, b in zip(first, now, strict=True) if a is not None and b is not None)
        assert now[-trace[head].pieces :] == first[-trace[head].pieces :] and None not in now[-trace[head].pieces :]
    assert engine.stats().weights.streamed_bytes > 0


def test_a_sequence_reaches_its_context_under_a_policy(smollm2: Path, limits: list[int]) -> None:
    """KV grows out of the cache's bytes in the middle of a generation, and gives them back."""
    new = CONTEXT - 8
    expected = headrace.Engine.load(smollm2, device="cpu", max_context=CONTEXT)
    tokens = expected.generate(PROMPT[:8], max_new_tokens=new, stop_tokens=()).token_ids
    for policy in ("lru", "byte-aware", "static"):
        engine = load(smollm2, limits[1], policy)  # type: ignore[arg-type]
        assert engine.generate(PROMPT[:8], max_new_tokens=new, stop_tokens=()).token_ids == tokens
        assert engine.stats().kv.growth_events > 0
        check_books(engine, limits[1])


def test_small_tensors_can_be_pinned_and_the_budget_lowered(smollm2: Path, limits: list[int], resident: Tokens) -> None:
    engine = load(smollm2, limits[1], "lru", pin_threshold=100_000, policy_budget="16MiB")
    assert generate(engine) == resident
    trace = engine.residency_trace()
    assert {t.pinned for t in trace if t.bytes <= 100_000} == {True}
    assert {t.pinned for t in trace if t.bytes > 100_000} == {False}
    assert engine.plan.memory is not None and engine.plan.memory.resident_bytes <= 16 << 20
    pinned = [t for t in trace if t.pinned]
    assert pinned and all(t.page_ins == t.pieces for t in pinned)


def test_a_policy_with_room_for_everything_streams_once(smollm2: Path, memory: headrace.MemoryPlan) -> None:
    engine = load(smollm2, memory.everything + (32 << 20), "lru")
    generate(engine)
    assert engine.stats().weights.streamed_bytes == sum(p.bytes for p in memory.pieces)
    engine.reset_stats()
    generate(engine)
    assert engine.stats().weights.streamed_bytes == 0


def test_what_makes_no_sense_is_refused(smollm2: Path, limits: list[int]) -> None:
    with pytest.raises(ValueError, match="matches no matrix"):
        load(smollm2, limits[1], "lru", pinned=["no.such.tensor"])
    with pytest.raises(ValueError, match="need a policy"):
        load(smollm2, limits[1], None, pin_threshold=1)
    with pytest.raises(ValueError, match="byte-aware"):
        load(smollm2, limits[1], "clock")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="in place"):
        headrace.Engine.load(smollm2, device="cpu", policy="lru")


def test_the_simulator_foretells_what_a_run_moves(smollm2: Path, limits: list[int]) -> None:
    options = {"vram_limit": limits[1], "max_context": CONTEXT, "max_batch": 1, "prefill_chunk": 64}
    result = headrace.simulate(smollm2, steps=8, **options)  # type: ignore[arg-type]
    plan = headrace.plan(smollm2, device="host-device", **options).memory  # type: ignore[arg-type]
    assert plan is not None
    assert pickle.loads(pickle.dumps(result)) == result
    assert [p.policy for p in result.policies] == list(POLICIES)
    assert result.optimum_bytes <= result.schedule_bytes == plan.streamed_bytes
    by_name = {p.policy: p for p in result.policies}
    assert by_name["static"].bytes_per_step == result.schedule_bytes
    for p in result.policies:
        assert p.bytes_per_step >= result.optimum_bytes and p.bytes_per_step >= result.schedule_bytes
        assert p.byte_hit_rate == pytest.approx(1 - p.bytes_per_step / result.step_bytes)
    assert by_name["lru"].hits_per_step == 0 and by_name["mru"].hits_per_step > 0
    # The engine's own cache, over as many steps of the first page of KV: the same bytes.
    for policy in POLICIES:
        engine = load(smollm2, limits[1], policy)
        engine.generate(PROMPT[:4], max_new_tokens=result.steps, stop_tokens=())
        assert engine.stats().tokens.steps == result.steps
        assert engine.stats().weights.streamed_bytes == by_name[policy].total_bytes


@pytest.fixture(scope="module", params=["gguf", "onnx"])
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue({"gguf": "smollm2", "onnx": "smollm2_onnx"}[request.param])
    return path


@pytest.fixture(scope="module")
def answers(model: Path) -> list[Tokens]:
    """What prompts of one, forty and four hundred tokens give where everything is resident."""
    ids = golden("gguf-q4_1-exact-fp64")["prompts"]["long"]["prompt_ids"]
    engine = headrace.Engine.load(model, device="cpu", max_context=448)
    return [engine.generate(ids[:n], max_new_tokens=3, stop_tokens=()).token_ids for n in (1, 40, 400)]


@pytest.mark.parametrize("layout", ["head-major", "seq-major"])
@pytest.mark.parametrize("share", [1, 2], ids=["quarter", "half"])
@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_of_any_length_on_both_containers(
    model: Path, answers: list[Tokens], policy: Policy, share: int, layout: str
) -> None:
    """One token, forty, four hundred; two generations in a row; about a quarter and about half of the weights stay."""
    ids = golden("gguf-q4_1-exact-fp64")["prompts"]["long"]["prompt_ids"]
    options = {"max_context": 448, "max_batch": 1, "prefill_chunk": 100, "kv_layout": layout}
    plan = headrace.plan(model, device="host-device", vram_limit="1TiB", **options).memory  # type: ignore[arg-type]
    assert plan is not None
    limit = plan.everything - plan.resident_bytes + 8 * 1024 * 1024 + plan.resident_bytes * share // 4
    engine = headrace.Engine.load(model, device="host-device", vram_limit=limit, policy=policy, **options)  # type: ignore[arg-type]
    for _ in range(2):
        tokens = [engine.generate(ids[:n], max_new_tokens=3, stop_tokens=()).token_ids for n in (1, 40, 400)]
        assert tokens == answers
    assert engine.stats().weights.streamed_bytes > 0
    check_books(engine, limit)
