"""The command line on a terminal and in pipes: a chat, progress, Ctrl-C, a reader that goes away."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import headrace
import pytest
from conftest import DATA

pty = pytest.importorskip("pty")

HEADRACE = [sys.executable, "-m", "headrace"]
TINY = str(DATA / "models" / "qwen3-Q4_1.gguf")


class Terminal:
    """A process whose standard streams are a terminal."""

    def __init__(self, process: subprocess.Popen[bytes], ours: int) -> None:
        self.process = process
        self.ours = ours
        self.seen = ""

    def read_until(self, text: str, seconds: float = 120) -> str:
        """What was shown up to `text`, which is taken off."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"no {text!r} in {self.seen!r}"
            if select.select([self.ours], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.ours, 4096).decode(errors="replace")
                except OSError:
                    raise AssertionError(f"ended without {text!r}: {self.seen!r}") from None
        shown, _, self.seen = self.seen.partition(text)
        return shown

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        [*HEADRACE, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_run_without_a_prompt_is_a_chat(smollm2: Path) -> None:
    with terminal("run", str(smollm2), "-n", "24") as t:
        t.read_until("> ")
        t.type("What is the capital of France?\n")
        t.read_until("Paris")
        t.read_until("> ")
        # The second turn knows the first one.
        t.type("Which city did I just ask about? Name it.\n")
        answer = t.read_until("\n> ")
        assert "Paris" in answer or "France" in answer
        # Ctrl-C stops an answer, and the chat goes on.
        t.type("/clear\n")
        t.read_until("> ")
        t.type("Tell me a long story.\n")
        t.read_until("\n")
        t.process.send_signal(signal.SIGINT)
        t.read_until("> ")
        t.type("/quit\n")
        assert t.process.wait(timeout=60) == 0


def test_a_chat_ends_with_the_input(smollm2: Path) -> None:
    with terminal("run", str(smollm2)) as t:
        t.read_until("> ")
        t.type("\x04")
        assert t.process.wait(timeout=60) == 0


def test_a_chat_needs_a_template() -> None:
    engine = headrace.Engine.load(TINY, device="cpu")
    assert not engine.has_chat_template, "another model is needed here"
    with terminal("run", TINY) as t:
        t.read_until("no chat template")
        assert t.process.wait(timeout=60) == 2


def test_a_long_prompt_shows_a_bar(smollm2: Path) -> None:
    with terminal("run", str(smollm2), "word " * 6000, "--raw", "-n", "1") as t:
        t.read_until("prompt ")
        t.read_until("/6001")


def test_a_bar_of_a_stream_goes_before_the_text_comes(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from headrace import _progress

    monkeypatch.setattr(_progress, "DELAY_SECONDS", 0.0)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    engine = headrace.Engine.load(smollm2, prefill_chunk=16)
    quiet = engine.stream([1] * 600, max_new_tokens=2)
    list(quiet)
    assert capfd.readouterr().err == "", "a test has no terminal"
    # Bars are drawn there as on a terminal.
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = engine.stream([1] * 600, max_new_tokens=2, progress=True)
    list(shown)
    assert "prompt" in capfd.readouterr().err
    assert shown.token_ids == quiet.token_ids


def test_ctrl_c_ends_a_simulation_at_once(smollm2: Path) -> None:
    command = ["plan", str(smollm2), "--simulate", "--steps", "10000", "--vram-limit", "60MB", "--max-context", "512"]
    # The signal comes when everything is imported: before that it is the interpreter's own.
    script = "import headrace.cli; print('ready', flush=True); headrace.cli.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(1.5)
    assert process.poll() is None, process.communicate()
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and stderr.strip() == "interrupted"
    assert time.monotonic() - sent < 3


COMMANDS = {
    "help": ["--help"],
    "help of a command": ["run", "--help"],
    "version": ["--version"],
    "run": ["run", TINY, "Hello", "--raw", "-n", "4"],
    "plan": ["plan", TINY],
    "plan of memory": ["plan", TINY, "--device", "host-device", "--max-context", "64", "--pieces", "--tensors"],
    "plan as JSON": ["plan", TINY, "--json"],
    "simulation": ["plan", TINY, "--simulate", "--max-context", "64"],
    "simulation as JSON": ["plan", TINY, "--simulate", "--max-context", "64", "--json"],
    "probe": ["probe"],
    "probe as JSON": ["probe", "--json"],
    "fetch": ["fetch", "smollm2-135m"],
    "info": ["info"],
    "info as JSON": ["info", "--json"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_reader_that_goes_away_ends_a_command_as_a_shell_expects(command: list[str]) -> None:
    theirs, ours = os.pipe()
    os.close(theirs)
    try:
        # Buffered, as it is by default: what is left in the buffer must not fail at the interpreter's end.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run([*HEADRACE, *command], stdout=ours, stderr=subprocess.PIPE, text=True, timeout=120, env=env)
    finally:
        os.close(ours)
    assert done.returncode == 141 and done.stderr == "", done.stderr
