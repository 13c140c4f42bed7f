"""Every argument of the Python surface with every wrong kind of value: each is refused in words, before anything is converted."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import headrace
import numpy as np
import pytest
from conftest import DATA
from headrace._arguments import tables

TINY = DATA / "models" / "qwen3-Q4_1.gguf"

# By kind of argument: values that are out of range, values of another type, and values that are fine.
NEGATIVE = [-1, np.int64(-1), -(2**70)]
NOT_INTEGERS = ["1", 1.0, 1.5, float("nan"), np.float64(2), True, False, np.bool_(True), b"1", [1], {}, object()]
NOT_NUMBERS = ["0.5", True, np.bool_(False), b"1", [1], {}, 1j, object()]
NOT_TEXT = [1, 1.5, True, b"auto", ["auto"], {}, object()]
NOT_FLAGS = [0, 1, 1.0, "yes", "", b"", [], {}, object()]
NOT_SIZES = [1e9, 1.0, True, False, np.float32(1), np.bool_(True), b"1GiB", [1], {}, Fraction(1), object()]
BAD_SIZES = ["", "x", "-1", "-1GiB", "1 XB", "1e9", "0x10", "1..5GiB", "½GiB", "٣", "nan", "8 Gi B", 2**61, "2000000000TiB", -5]
NO_SHARE = ["80%", "0%"]
BAD_SHARES = ["120%", "100.1%", "0%", "%", "-5%"]


def integers(least: int, most: int) -> tuple[list[Any], list[Any], list[Any]]:
    return [*NEGATIVE, least - 1, most + 1, 2**64, 2**200], NOT_INTEGERS, [least, np.int64(least), np.uint8(least)]


def or_none(kind: tuple[list[Any], list[Any], list[Any]]) -> tuple[list[Any], list[Any], list[Any]]:
    return kind[0], kind[1], [*kind[2], None]


def required(kind: tuple[list[Any], list[Any], list[Any]]) -> tuple[list[Any], list[Any], list[Any]]:
    return kind[0], [*kind[1], None], kind[2]


def names(*good: str) -> tuple[list[Any], list[Any], list[Any]]:
    return ["", "gpu", good[0].upper(), good[0] + " "], NOT_TEXT, list(good)


COUNT = 2**32 - 1
LOAD = {
    "device": required((["", "gpu", "CPU", "cuda:", "cuda:-1", "cuda:x", "cuda:٣"], NOT_TEXT, ["cpu", "auto", "host-device"])),
    "vram_limit": or_none(([*BAD_SIZES, *BAD_SHARES, 0, "0"], NOT_SIZES, ["1GiB", 2**30, np.int64(2**30), " 1.5 gib "])),
    "host_limit": or_none(([*BAD_SIZES, *BAD_SHARES], NOT_SIZES, [0, "0", "50%", "1GiB"])),
    "placement": required(names("stream", "auto", "resident", "zero-copy", "hybrid")),
    "host_mapped_budget": or_none(([*BAD_SIZES, *NO_SHARE], NOT_SIZES, [0, "0", "0GiB", "1GiB", np.int32(0)])),
    "headroom": or_none(([*BAD_SIZES, *NO_SHARE], NOT_SIZES, [0, "0", "0 MiB", "1MiB"])),
    "max_context": or_none(integers(1, COUNT)),
    "max_batch": required(integers(1, 65_536)),
    "prefill_chunk": required(integers(1, 65_536)),
    "steps_in_flight": or_none(integers(1, 8)),
    "activations": required(names("int16", "int8")),
    "kv_dtype": required(names("float16", "float32")),
    "kv_layout": required(names("head-major", "seq-major")),
    "threads": or_none(integers(1, 1024)),
    "piece_bytes": or_none(([*BAD_SIZES, *NO_SHARE, 0, 4095, "1KB", 2**30 + 1], NOT_SIZES, [4096, "64KiB", 2**30])),
    "ring_slots": required(integers(2, 64)),
    "policy": or_none(names("lru", "static")),
    "pinned": required(([], [1, 1.5, b"x", {}, object(), [1], ["x", None], [b"x"]], ["blk.*", [], ["blk.*"], ("blk.0*", "blk.1*")])),
    "pin_threshold": or_none(([*BAD_SIZES, *NO_SHARE], NOT_SIZES, [0, "0", "1MiB"])),
    "policy_budget": or_none(([*BAD_SIZES, *NO_SHARE], NOT_SIZES, [0, "0", "1MiB"])),
}

ODD_NUMBERS = [float("nan"), float("inf"), float("-inf"), -1, -0.1, 10**400, 1e-46, np.float32(-1)]
PROMPTS = [None, 1, 1.5, True, b"abc", bytearray(b"abc"), memoryview(b"abc"), {"role": "user"}, {1, 2}, object(), iter([1])]
NOT_IDS = [[1.0], ["x", 1], [True], [None], [b"a"], np.array([1.5]), [np.bool_(True)]]
OUTSIDE = [[-1], [10**9], [2**64], [1, 2, -3], np.array([-1]), [[-1]], [[1], [10**9]]]
STOPS = ([[-1], [10**9], np.array([-1]), {-1}], ["</s>", b"x", 1, True, {}, object(), ["</s>"], [1.0], [True], [None]], [(), [1], {1, 2}, None])
GENERATE = {
    "max_new_tokens": or_none((integers(0, COUNT)[0], NOT_INTEGERS, [0, 1, np.int64(2)])),
    "temperature": required(([*ODD_NUMBERS, 1e39], NOT_NUMBERS, [0, 0.0, 1, np.float32(0.5), Fraction(1, 2)])),
    "top_k": required(integers(0, COUNT)),
    "top_p": required(([*ODD_NUMBERS, 0, 1.01, 2], NOT_NUMBERS, [1, 0.5, np.float64(0.5)])),
    "seed": or_none(integers(0, 2**64 - 1)),
    "stop_tokens": STOPS,
    "speculation": required(integers(0, 256)),
    "keep_logits": required(([], NOT_FLAGS, [True, False, np.bool_(False)])),
    "progress": or_none(([], NOT_FLAGS, [False])),
}
STREAM = {name: kind for name, kind in GENERATE.items() if name != "keep_logits"}
SUBMIT = {name: kind for name, kind in GENERATE.items() if name != "progress"}


@pytest.fixture(scope="module")
def tiny() -> headrace.Engine:
    return headrace.Engine.load(TINY, device="host-device", vram_limit="64MiB", max_context=64, threads=1)


def refused(call: Callable[[Any], Any], argument: str, kinds: tuple[list[Any], list[Any], list[Any]]) -> None:
    values, types, _ = kinds
    for error, wrong in ((ValueError, values), (TypeError, types)):
        for value in wrong:
            with pytest.raises(error) as raised:
                call(value)
            text = str(raised.value)
            assert text.startswith(argument) and " = " in text and ": must " in text and "\n" not in text, f"{value!r}: {text}"
            # What was given is in it, or its beginning.
            given = value.item() if isinstance(value, np.generic) else value
            if isinstance(given, (bool, int, float, bytes)) and len(repr(given)) < 40:
                assert repr(given) in text, f"{value!r}: {text}"


def taken(call: Callable[[Any], Any], kinds: tuple[list[Any], list[Any], list[Any]]) -> None:
    for value in kinds[2]:
        call(value)


@pytest.mark.parametrize("name", LOAD)
def test_options_of_an_engine(name: str) -> None:
    # A residency policy's options need one, and modes that place weights a device with memory.
    with_policy = {"policy": "lru"} if name in ("pinned", "pin_threshold", "policy_budget") else {}
    defaults = {"device": "host-device", "max_context": 64, "threads": 1} | with_policy
    refused(lambda value: headrace.Engine.load(TINY, **{**defaults, name: value}), name, LOAD[name])
    taken(lambda value: headrace.Engine.load(TINY, **{**defaults, name: value}), LOAD[name])


def test_every_option_of_an_engine_is_in_the_table() -> None:
    parameters = [p for p in inspect.signature(headrace.Engine.load).parameters if p != "model"]
    assert parameters == list(LOAD) == list(tables.LOAD)
    for function in (headrace.plan, headrace.simulate):
        known = {*LOAD, "model", "length", "policies", "steps"}
        assert set(inspect.signature(function).parameters) <= known


@pytest.mark.parametrize("name", [n for n in inspect.signature(headrace.plan).parameters if n in LOAD])
def test_options_of_a_plan(name: str) -> None:
    refused(lambda value: headrace.plan(TINY, **{name: value}), name, LOAD[name])


@pytest.mark.parametrize("name", [n for n in inspect.signature(headrace.simulate).parameters if n in LOAD])
def test_options_of_a_simulation(name: str) -> None:
    refused(lambda value: headrace.simulate(TINY, **{name: value}), name, LOAD[name])


def test_what_plan_and_simulate_have_of_their_own() -> None:
    refused(lambda value: headrace.plan(TINY, length=value), "length", or_none(integers(1, COUNT)))
    refused(lambda value: headrace.simulate(TINY, steps=value), "steps", required(integers(2, 10_000)))
    wrong = ([[], (), ["fifo"]], ["lru", b"lru", None, 1, [1], [None], {"lru"}, {}], [])
    refused(lambda value: headrace.simulate(TINY, policies=value), "policies", wrong)


@pytest.mark.parametrize(
    "function", [headrace.Engine.load, headrace.plan, headrace.simulate], ids=["load", "plan", "simulate"]
)
def test_the_model(function: Callable[[Any], Any]) -> None:
    refused(function, "model", (["", "a\0b"], [None, 1, 1.5, True, b"model.gguf", ["x"], {}, object()], []))


def test_fetch() -> None:
    refused(headrace.fetch, "name", ([], [None, 1, b"smollm2-135m", ["smollm2-135m"]], []))


@pytest.mark.parametrize("name", GENERATE)
def test_options_of_a_generation(tiny: headrace.Engine, name: str) -> None:
    def generate(value: Any) -> Any:
        return tiny.generate([1, 2], **{"max_new_tokens": 1, name: value})

    refused(generate, name, GENERATE[name])
    taken(generate, GENERATE[name])
    # A list goes another way.
    refused(lambda value: tiny.generate([[1, 2]], **{"max_new_tokens": 1, name: value}), name, GENERATE[name])


@pytest.mark.parametrize("name", STREAM)
def test_options_of_a_stream(tiny: headrace.Engine, name: str) -> None:
    def stream(value: Any) -> Any:
        with tiny.stream([1, 2], **{"max_new_tokens": 1, name: value}) as pieces:
            return list(pieces)

    refused(stream, name, STREAM[name])
    taken(stream, STREAM[name])


@pytest.mark.parametrize("name", SUBMIT)
def test_options_of_a_request(tiny: headrace.Engine, name: str) -> None:
    with tiny.serve() as server:
        refused(lambda value: server.submit([1, 2], **{"max_new_tokens": 1, name: value}), name, SUBMIT[name])
        taken(lambda value: server.submit([1, 2], **{"max_new_tokens": 1, name: value}).result(), SUBMIT[name])


def test_what_servers_and_requests_have_of_their_own(tiny: headrace.Engine) -> None:
    server = tiny.serve()
    refused(lambda value: server.close(cancel=value), "cancel", required(([], NOT_FLAGS, [])))
    request = server.submit([1, 2], max_new_tokens=1)
    timeouts = ([-1, -0.5, float("nan")], NOT_NUMBERS, [10, 10.5, np.float32(10), float("inf"), None])
    refused(lambda value: request.result(value), "timeout", timeouts)
    taken(lambda value: request.result(value), timeouts)
    server.close()


def test_every_option_of_a_generation_is_in_a_table() -> None:
    for function, table in (
        (headrace.Engine.generate, GENERATE), (headrace.Engine.stream, STREAM), (headrace.Server.submit, SUBMIT),
    ):  # fmt: skip
        assert [p for p in inspect.signature(function).parameters if p not in ("self", "prompt")] == list(table)


def test_prompts(tiny: headrace.Engine) -> None:
    outside, types = OUTSIDE[:5], [*PROMPTS, *NOT_IDS]
    refused(lambda value: tiny.generate(value, max_new_tokens=1), "prompt", (outside, types, []))
    refused(lambda value: tiny.stream(value, max_new_tokens=1), "prompt", (outside, [*types, [[1, 2]]], []))
    refused(lambda value: tiny.decode_greedy_batch([[1], value], max_new_tokens=1), "prompts[1]", (outside, [*types, [[1, 2]]], []))
    refused(lambda value: tiny.generate(value), "prompt", (OUTSIDE, [["x", 1], [[1], "x", 1], [[1], b"x"], [b"x"], [{}]], []))
    with tiny.serve() as server:
        refused(lambda value: server.submit(value, max_new_tokens=1), "prompt", (outside, [*PROMPTS, *NOT_IDS], []))
    for value in ([1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], dtype=np.uint8), range(1, 3), [np.int32(1), 2]):
        assert tiny.generate(value, max_new_tokens=3, stop_tokens=()).token_ids == tiny.generate([1, 2], max_new_tokens=3, stop_tokens=()).token_ids
    assert len(tiny.generate(np.array([[1, 2], [3, 4]]), max_new_tokens=1)) == 2
    with pytest.raises(TypeError, match=r"not dict; messages of a chat .*engine.chat"):
        tiny.generate([{"role": "user", "content": "Hi"}])  # type: ignore[list-item]


def test_an_empty_list_gives_an_empty_list_and_an_empty_prompt_an_error(tiny: headrace.Engine) -> None:
    assert tiny.generate([]) == [] and tiny.generate(()) == []
    assert len(tiny.decode_greedy_batch([], max_new_tokens=1)) == 0
    assert tiny.logits([]).shape == (0, tiny.vocab_size)
    for call in (
        lambda: tiny.generate([[]]), lambda: tiny.generate([[1], []]), lambda: tiny.generate(np.array([], dtype=int)),
        lambda: tiny.stream([]), lambda: tiny.decode_greedy_batch([[1], []], max_new_tokens=1), lambda: tiny.logits([[1], []]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="must hold at least one token"):
            call()
    # A text may hold none.
    for call, name in (
        (lambda: tiny.generate(""), "prompt"), (lambda: tiny.generate(["a", ""]), r"prompt\[1\]"), (lambda: tiny.stream(""), "prompt"),
        (lambda: tiny.decode_greedy_batch(["a", ""], max_new_tokens=1), r"prompts\[1\]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f'^{name} = "": must hold at least one token'):
            call()


def test_a_batch(tiny: headrace.Engine) -> None:
    def batch(**changed: Any) -> Any:
        return tiny.decode_greedy_batch(**{"prompts": [[1], [2]], "max_new_tokens": 1, **changed})

    with pytest.raises(TypeError, match=r'prompts = "Hi": must be a list of prompts, not str; for one prompt give \["Hi"\]'):
        batch(prompts="Hi")
    refused(lambda value: batch(prompts=value), "prompts", ([[[-1]]], [*PROMPTS, "Hi", [1, 2], np.array([1, 2])], []))
    refused(lambda value: batch(max_new_tokens=value), "max_new_tokens", (integers(0, COUNT)[0], [*NOT_INTEGERS, None][:9], []))
    refused(lambda value: batch(max_new_tokens=[1, value]), "max_new_tokens[1]", (NEGATIVE, [*NOT_INTEGERS, None], []))
    refused(lambda value: batch(stop_tokens=value), "stop_tokens", STOPS)
    refused(lambda value: batch(stop_tokens=[[1], value]), "stop_tokens[1]", (STOPS[0][:2], [["</s>"], [True]], []))
    refused(lambda value: batch(speculation=value), "speculation", GENERATE["speculation"])
    refused(lambda value: batch(progress=value), "progress", GENERATE["progress"])
    taken(lambda value: batch(stop_tokens=value), STOPS)
    names = [p for p in inspect.signature(headrace.Engine.decode_greedy_batch).parameters if p != "self"]
    assert names == ["prompts", "max_new_tokens", "stop_tokens", "speculation", "progress"]


def test_everything_else_of_an_engine(tiny: headrace.Engine) -> None:
    refused(lambda value: tiny.encode(value), "text", ([], [*NOT_TEXT, None], []))
    refused(lambda value: tiny.encode("x", add_special=value), "add_special", required(([], NOT_FLAGS, [])))
    refused(lambda value: tiny.decode(value), "token_ids", (OUTSIDE[:5], [None, 1, "x", b"x", {}, object(), *NOT_IDS], []))
    refused(lambda value: tiny.decode([1], skip_special=value), "skip_special", required(([], NOT_FLAGS, [])))
    refused(lambda value: tiny.logits(value), "sequences", (OUTSIDE[5:], [None, 1, "x", b"x", {}, [1, 2], ["x"], [[1.0]]], []))
    refused(lambda value: tiny.logits([[1]], last_only=value), "last_only", required(([], NOT_FLAGS, [])))
    refused(lambda value: tiny.trade(value), "length", or_none(integers(1, COUNT)))
    refused(lambda value: tiny.set_vram_limit(value), "vram_limit", required(LOAD["vram_limit"]))


def test_a_class_that_isn_t_called_says_what_makes_its_objects(tiny: headrace.Engine) -> None:
    with pytest.raises(TypeError, match=r'"smollm2-135m": this class isn\'t called: headrace.Engine.load\(...\) makes its objects'):
        headrace.Engine("smollm2-135m")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"engine.serve\(\)"):
        headrace.Server(tiny, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"server.submit"):
        headrace.Request(None, None, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Engine.stream"):
        headrace.Stream("x", None, None)  # type: ignore[arg-type]


def test_sizes_are_exact_and_zero_is_a_size() -> None:
    plan = headrace.plan(TINY, device="host-device", vram_limit="64 MiB", max_context=64, headroom="0", host_mapped_budget=0)
    assert plan.memory is not None and plan.memory.limit == 64 << 20
    assert (plan.memory.placement.headroom, plan.memory.placement.host_mapped_budget) == (0, 0)
    odd = 2**59 + 1
    plan = headrace.plan(TINY, device="host-device", vram_limit=str(odd), max_context=64)
    assert plan.memory is not None and plan.memory.limit == odd, "not rounded to a float"


def test_a_percentage_is_one_of_the_device_s_memory(tiny: headrace.Engine) -> None:
    whole = headrace.plan(TINY, device="host-device", vram_limit="100%", max_context=64)
    half = headrace.plan(TINY, device="host-device", vram_limit="50%", max_context=64)
    assert whole.memory is not None and half.memory is not None
    assert whole.memory.limit > 2**28 and half.memory.limit == whole.memory.limit // 2
    before = tiny.plan.memory
    assert before is not None
    try:
        tiny.set_vram_limit("50%")
        after = tiny.plan.memory
        assert after is not None and after.limit == half.memory.limit
    finally:
        tiny.set_vram_limit(before.limit)
    with pytest.raises(ValueError, match=r'vram_limit = "120%": must be above 0 and at most 1 EiB or 100%'):
        tiny.set_vram_limit("120%")
    with pytest.raises(ValueError, match=r'vram_limit = "80%": the CPU .* "host-device"'):
        headrace.Engine.load(TINY, device="cpu", vram_limit="80%")


def card() -> bool:
    try:
        return headrace._core.total_memory("cuda") > 0
    except ValueError:
        return False


def test_a_percentage_of_a_card_that_isn_t_here() -> None:
    if card():
        pytest.skip("there is a card")
    for device in ("cuda", "auto"):
        with pytest.raises(ValueError, match=r'vram_limit = "80%": device = "(cuda:0|auto)" .*(driver|card|CUDA)'):
            headrace.Engine.load(TINY, device=device, vram_limit="80%")  # type: ignore[arg-type]


def test_a_percentage_of_a_card() -> None:
    if not card():
        pytest.skip("there is no card")
    total = headrace._core.total_memory("cuda")
    for device in ("cuda", "auto"):
        engine = headrace.Engine.load(TINY, device=device, vram_limit="50%", max_context=64)  # type: ignore[arg-type]
        assert engine.plan.memory is not None and engine.plan.memory.limit == total // 2
        engine.set_vram_limit("40%")
        assert engine.plan.memory.limit == total * 2 // 5
        del engine


def test_a_limit_without_a_card_says_why_and_what_to_do() -> None:
    if card():
        pytest.skip("there is a card")
    for options in ({"vram_limit": "64MiB"}, {"placement": "stream"}):
        with pytest.raises(ValueError) as raised:
            headrace.Engine.load(TINY, device="auto", **options)  # type: ignore[arg-type]
        text = str(raised.value)
        assert 'device = "auto" found no card (' in text and 'device = "host-device"' in text
        assert any(word in text for word in ("driver", "CUDA", "card (s)")), text


def test_a_card_that_isn_t_here_is_planned_for_and_said_to_be_assumed() -> None:
    if card():
        pytest.skip("there is a card")
    for device, options in (("auto", {"vram_limit": "2GiB"}), ("cuda", {}), ("cuda", {"vram_limit": 2**31}), ("auto", {"placement": "stream"})):
        plan = headrace.plan(TINY, device=device, max_context=64, **options)  # type: ignore[arg-type]
        assert plan.memory is not None and plan.memory.assumed is not None
        assert "planned for a card that isn't here (" in plan.memory.assumed
        needs = {need.name: need for need in plan.memory.needs}
        assert needs["context"].bytes == 768 << 20 and "assumed" in needs["context"].why
        assert needs["graphs"].bytes == 32 << 20 and all(need.bytes % (2 << 20) == 0 for need in plan.memory.needs)
    with pytest.raises(headrace.BudgetError, match="assumed"):
        headrace.plan(TINY, device="cuda", vram_limit="100MiB", max_context=64)
    # Nothing about memory was asked: then it is the CPU's plan, as it would be loaded.
    assert headrace.plan(TINY, device="auto").memory is None
    here = headrace.plan(TINY, device="host-device", vram_limit="64MiB", max_context=64)
    assert here.memory is not None and here.memory.assumed is None
