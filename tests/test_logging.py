"""What the core says, in Python's `logging`: names, levels, threads that wait for each other, handlers that fail."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import headrace
import pytest
from conftest import DATA

TINY = DATA / "models" / "qwen3-Q4_1.gguf"


class Kept(logging.Handler):
    """Keeps records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept() -> Iterator[Kept]:
    """The records of everything from INFO up, while a test runs."""
    logger, handler = logging.getLogger("headrace"), Kept()
    level, logger.propagate = logger.level, False
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
    logger.propagate = True


def python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A process of its own, which shows where its threads are if it hangs."""
    script = "import faulthandler; faulthandler.dump_traceback_later(60, exit=True)\n" + script
    return subprocess.run(
        [sys.executable, "-c", script, str(TINY), *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def unknown_key(folder: Path) -> Path:
    """A sound model with a metadata key that nobody knows."""
    data = TINY.read_bytes()
    assert data.count(b"general.license") == 1
    path = folder / "model.gguf"
    path.write_bytes(data.replace(b"general.license", b"qwen3.unheardof"))
    return path


def test_auto_says_once_why_it_is_the_cpu(kept: Kept) -> None:
    engine = headrace.Engine.load(TINY, device="auto", max_context=64)
    if engine.stats().device.name != "cpu":
        pytest.skip("there is a card")
    [record] = kept.records
    assert record.levelno == logging.INFO and record.name == "headrace.engine.setup"
    reason = engine.stats().device.asked_for.removeprefix("auto; no CUDA: ")
    assert reason and record.getMessage() == f"device auto: computing on the CPU, because of CUDA: {reason}"
    assert record.thread == threading.get_ident() and record.pathname.endswith("setup.rs") and record.lineno > 0


def test_a_warning_arrives(kept: Kept, tmp_path: Path) -> None:
    path = unknown_key(tmp_path)
    headrace.plan(path, device="cpu")
    [record] = kept.records
    assert record.levelno == logging.WARNING and record.name == "headrace.model.gguf.keys"
    assert record.getMessage() == f"{path}: metadata key qwen3.unheardof is not known and not used"


def test_the_server_s_thread_is_heard(kept: Kept) -> None:
    engine = headrace.Engine.load(TINY, device="cpu", max_context=64, steps_in_flight=4)
    with engine.serve() as server:
        assert len(server.submit([1, 2, 3], max_new_tokens=4, stop_tokens=()).result().token_ids) == 4
    [record] = kept.records
    assert record.name == "headrace.engine.engine.step" and "steps in flight" in record.getMessage()
    assert record.thread != threading.get_ident()


def test_a_change_of_levels_counts_from_the_next_call_on(kept: Kept, tmp_path: Path) -> None:
    logger, path = logging.getLogger("headrace"), unknown_key(tmp_path)
    for level, heard in [(logging.ERROR, 0), (logging.WARNING, 1), (logging.CRITICAL, 1), (logging.DEBUG, 2)]:
        logger.setLevel(level)
        headrace.plan(path, device="cpu")
        assert len(kept.records) == heard


def test_nothing_is_printed_by_default_but_warnings(tmp_path: Path) -> None:
    script = "import sys, headrace; headrace.Engine.load(sys.argv[-1], max_context=64).generate([1], max_new_tokens=1)"
    assert (done := python(script)).returncode == 0 and done.stderr == ""
    done = python(script, unknown_key(tmp_path))
    assert done.returncode == 0 and done.stderr.count("\n") == 1 and "qwen3.unheardof" in done.stderr


def test_the_core_can_be_imported_again() -> None:
    """The process has its logger then."""
    done = python(
        "import sys, logging, headrace\n"
        "del sys.modules['headrace._core']\n"
        "import headrace._core as again\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "engine = headrace.Engine.load(sys.argv[1], steps_in_flight=4, device='cpu', max_context=64)\n"
        "engine.generate([1], max_new_tokens=2, stop_tokens=())"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("steps in flight") == 1


class Failing(logging.Handler):
    """Raises in `handle`, where `logging` catches nothing."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def handle(self, record: logging.LogRecord) -> bool:
        raise self.error


@pytest.fixture
def failing(kept: Kept) -> Iterator[Failing]:
    handler = Failing(RuntimeError("no disk"))
    logging.getLogger("headrace").addHandler(handler)
    yield handler
    logging.getLogger("headrace").removeHandler(handler)


def test_a_handler_that_fails_harms_no_call(
    failing: Failing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unheard: list[SimpleNamespace] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: unheard.append(SimpleNamespace(value=u.exc_value, where=u.object)))
    assert headrace.plan(unknown_key(tmp_path), device="cpu").model.layers > 0
    assert [u.value for u in unheard] == [failing.error] and "logging handler" in unheard[0].where
    engine = headrace.Engine.load(TINY, device="cpu", max_context=64, steps_in_flight=4)
    with engine.serve() as server:
        assert len(server.submit([1, 2], max_new_tokens=4, stop_tokens=()).result().token_ids) == 4
    assert len(unheard) == 2


def test_ctrl_c_in_a_handler_is_not_lost(failing: Failing, tmp_path: Path) -> None:
    failing.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        headrace.plan(unknown_key(tmp_path), device="cpu")
        for _ in range(10_000):
            pass


PRELUDE = """
import gc, logging, sys, threading, time, headrace
from headrace._options import generate_options

entered, todo = threading.Event(), []

class Slow(logging.Handler):
    # Lets other threads run while the engine waits for it.
    def emit(self, record):
        entered.set()
        time.sleep(0.3)
        while todo:
            todo.pop(0)()

logging.getLogger("headrace").addHandler(Slow())

def load(**options):
    options = {"device": "cpu", "max_context": 64, "steps_in_flight": 4, "threads": 1} | options
    return headrace.Engine.load(sys.argv[1], **options)

engine = load()
logging.getLogger("headrace").setLevel(logging.INFO)
GREEDY = dict(temperature=0.0, top_k=0, top_p=1.0, seed=0, stop_tokens=[], speculation=0, keep_logits=False)
OPTIONS = generate_options(max_new_tokens=30, **GREEDY)
"""

WAITS = {
    "a server closed": """
with engine.serve() as server:
    request = server.submit([1, 2, 3], max_new_tokens=30)
    entered.wait()
""",
    "a server let go": """
inner = engine._inner.serve()
request = inner.submit([1, 2, 3], OPTIONS)
entered.wait()
del inner
assert request.done
""",
    "a server started": """
thread = threading.Thread(target=lambda: engine.generate([1, 2], max_new_tokens=30, stop_tokens=()))
thread.start()
entered.wait()
engine.serve().close()
thread.join()
""",
    "a stream let go": """
stream = engine.stream([5, 6], max_new_tokens=30)
thread = threading.Thread(target=lambda: engine.generate([1, 2], max_new_tokens=30, stop_tokens=()))
thread.start()
entered.wait()
del stream
thread.join()
assert engine.stats().kv.sequences == 0
""",
    "what a handler lets go": """
box = [engine.stream([5, 6], max_new_tokens=30), engine.serve(), engine._inner.serve()]
todo += [lambda: print("gone"), box.clear]
engine.generate([1, 2], max_new_tokens=30, stop_tokens=())
while engine.stats().kv.sequences:
    time.sleep(0.01)
""",
    "what the server's handler lets go": """
box = [engine.stream([5, 6], max_new_tokens=30), engine.serve(), engine._inner.serve()]
request = box[1].submit([1, 2, 3], max_new_tokens=30, stop_tokens=())
todo += [lambda: print("gone"), box.clear]
entered.wait()
while not request.done or engine.stats().kv.sequences:
    time.sleep(0.01)
""",
    "a handler that uses the engine": """
def use():
    for call in (engine.stats, lambda: engine.generate([1], max_new_tokens=1), engine.serve, lambda: next(stream), load, lambda: request.result()):
        try:
            call()
        except headrace.HeadraceError as error:
            assert "logging handler" in str(error)
            print("refused")
stream = engine.stream([5, 6], max_new_tokens=30)
todo.append(use)
with engine.serve() as server:
    request = server.submit([1, 2, 3], max_new_tokens=30, stop_tokens=())
    assert len(request.result().token_ids) == 30
stream.close()
""",
    "the end of the interpreter": """
engine = load(device="host-device", max_context=1024)
server = engine.serve()
request = server.submit([1, 2, 3], stop_tokens=())
entered.wait()
""",
    "a handler at the end of the interpreter": """
todo.append(lambda: print("heard", flush=True))
# Nor does logging.shutdown wait for this one.
logging.getLogger("headrace").handlers[0].lock = None
engine = load(device="host-device", max_context=1024)
inner = engine._inner.serve()
request = inner.submit([1, 2, 3], generate_options(max_new_tokens=1000, **GREEDY))
entered.wait()
""",
}


@pytest.mark.parametrize("case", WAITS)
def test_nobody_waits_for_a_thread_that_logs(case: str) -> None:
    done = python(PRELUDE + WAITS[case] + "\nprint('done')")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = ["gone", "done"] if "lets go" in case else ["done"]
    lines = {
        "a handler that uses the engine": ["refused"] * 6 + ["done"],
        "a handler at the end of the interpreter": ["done", "heard"],
    }.get(case, lines)
    assert done.stdout.split() == lines


def test_nothing_is_passed_on_once_the_interpreter_ends(tmp_path: Path) -> None:
    done = python(
        "import atexit, sys\n"
        "atexit.register(lambda: (headrace.plan(sys.argv[2], device='cpu'), print('planned')))\n"
        "import headrace\n"
        "headrace.plan(sys.argv[2], device='cpu')\n",
        unknown_key(tmp_path),
    )
    assert done.returncode == 0 and done.stdout == "planned\n" and done.stderr.count("\n") == 1


def test_the_command_line_says_more_with_v(tmp_path: Path) -> None:
    def stderr(*arguments: str) -> str:
        done = subprocess.run([sys.executable, "-m", "headrace", *arguments], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stderr

    run = ("run", str(TINY), "x", "-n", "1", "--device", "cpu", "--max-context", "64")
    assert stderr(*run) == ""
    auto = ("run", str(TINY), "x", "-n", "1", "--max-context", "64")
    if not headrace.probe().cards:
        line = stderr(*auto, "-v")
        assert line == stderr("-v", *auto) and line.count("\n") == 1
        assert line.startswith("INFO headrace.engine.setup: device auto: computing on the CPU")
    line = stderr("plan", "--device", "cpu", "-v", str(unknown_key(tmp_path)))
    assert line.startswith("WARNING headrace.model.gguf.keys: ") and line.count("\n") == 1
