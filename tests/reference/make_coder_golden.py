"""Writes the float64 golden of Qwen2.5-Coder-1.5B-Instruct Q4_K_M: `python -m tests.reference.make_coder_golden [OUT_FILE]`.

Layers are expanded one at a time, so that it takes 3 GB of memory and some minutes. Headrace proposes the tokens; the float64 model
accepts them only if each is its own greedy one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import headrace

from . import gguf_weights
from .make_goldens import DATA, golden, sha256, write

NEW = 24
PROMPTS = {
    "code": "def fibonacci(n: int) -> int:\n",
    "capital": "The capital of France is",
    "numbers": "1, 1, 2, 3, 5, 8, 13,",
}
CHAT = [{"role": "user", "content": "Write a Python function that reverses a string."}]


def main(out: Path) -> None:
    """Write the golden file."""
    path = headrace.fetch("qwen2.5-coder-1.5b")
    engine = headrace.Engine.load(path, device="cpu", kv_dtype="float32", max_context=256)
    texts = PROMPTS | {"chat": engine.apply_chat_template(CHAT)}
    prompts = {}
    for key, text in texts.items():
        ids = engine.encode(text)
        tokens = list(engine.generate(ids, max_new_tokens=NEW, stop_tokens=()).token_ids)
        prompts[key] = {"text": text, "prompt_ids": ids, "generated_ids": tokens}
    del engine
    model = gguf_weights.load(str(path), lazy=True, positions=256)
    write(out, golden(model, path.name, "computed in float64", {path.name: sha256(path)}, prompts) | {"max_new_tokens": NEW})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA / "golden" / "qwen2.5-coder-1.5b-exact-fp64.json")
