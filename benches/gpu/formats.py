"""Times whole steps of the 14B shape in every weight format on a CUDA card; small models are compared with the CPU first.

    python benches/gpu/formats.py --formats q4_0 q4_k --linear gpu_kernels.json --peers peers.json --out results

`--linear` takes the file that `gpu_kernels bench` wrote, for the linear layers alone; `--peers` a file of another engine's tokens/s,
`{"name": ..., "q4_k": {"1": 166, "prompt512": 4640}}`. Writes `results/kernels.json`: a header and `rows`. Needs the package gguf.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import headrace
import make_gguf
import make_model
import run
from instruments import add_arguments, header

ROWS = (1, 8, 32)


def build(name: str, shape: str, folder: Path) -> Path:
    """The path of a model of this shape in this format, made if it isn't there."""
    if name == "matmulnbits":
        path = folder / f"{shape}-onnx"
        if not (path / "model.onnx").exists():
            make_model.build(make_model.SHAPES[shape], path, 1)
        return path
    path = folder / f"{shape}-{name}.gguf"
    if not path.exists():
        make_gguf.build(make_model.SHAPES[shape], name, path)
    return path


def check(name: str, folder: Path) -> int:
    """Compares a small model with the CPU: the number of comparisons. Ends the run if a bit differs."""
    rows = run.check(build(name, "small", folder))
    if not all(r["equal"] for r in rows):
        raise SystemExit(f"{name}: bits differ; nothing is timed")
    return len(rows)


def time_format(name: str, path: Path, activations: str, linear: dict[Any, float], peers: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of one format: decode steps of 1, 8 and 32 sequences and a prompt of 512, everything resident."""
    engine = headrace.Engine.load(
        path, device="cuda", activations=activations, max_context=2048, max_batch=32, prefill_chunk=run.PREFILL_CHUNK
    )
    step_bytes = engine.plan.model.step_bytes
    rows = []
    for count in (*ROWS, "prompt512"):
        got = run.prefill(engine) if count == "prompt512" else run.decode(engine, int(count), 48)
        peer = peers.get(name, {}).get(str(count))
        row = {
            "format": name, "activations": activations, "rows": count, "step_ms": got["step_ms"],
            "tokens_per_s": got["tokens_per_s"], "weights_bytes": step_bytes,
            "linear_ms": linear.get((name, activations, count)),
            "peer": peers.get("name") if peer else None, "peer_tokens_per_s": peer,
        }  # fmt: skip
        rows.append(row)
        print(row, flush=True)
    return rows


def linear_times(path: Path | None) -> dict[Any, float]:
    """Milliseconds of all linear layers by (format, activations, rows), of what `gpu_kernels bench` wrote."""
    if path is None:
        return {}
    found: dict[Any, float] = {}
    for r in json.loads(path.read_text(encoding="utf-8"))["results"]:
        if r["what"].startswith("all layers"):
            rows = "prompt512" if r["rows"] == 512 else r["rows"]
            key = (r["format"], f"int{r['bits']}", rows)
            found[key] = min(r["ms"], found.get(key, r["ms"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ["matmulnbits", *make_gguf.FORMATS, *make_gguf.MIXES]
    parser.add_argument("--formats", nargs="+", choices=known, default=known)
    parser.add_argument("--activations", nargs="+", choices=("int16", "int8"), default=["int16", "int8"])
    parser.add_argument("--shape", choices=make_model.SHAPES, default="14b")
    parser.add_argument("--linear", type=Path)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--no-check", action="store_true", help="time alone, after a run that has compared")
    parser.add_argument("--out", type=Path, required=True)
    add_arguments(parser)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    peers = json.loads(a.peers.read_text(encoding="utf-8")) if a.peers else {}
    result: dict[str, Any] = {"header": header("cuda", a.commit), "rows": []}
    linear, compared = linear_times(a.linear), 0
    with tempfile.TemporaryDirectory(prefix="headrace-formats-") as name:
        folder = Path(name)
        for fmt in [] if a.no_check else a.formats:
            compared += check(fmt, folder)
        for fmt in a.formats:
            path = build(fmt, a.shape, folder)
            for activations in a.activations:
                result["rows"] += time_format(fmt, path, activations, linear, peers)
            if path.is_file():
                path.unlink()
            (a.out / "kernels.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"\n{compared} comparisons equal")
    print(f"{'format':>12} {'act':>6} {'rows':>10} {'linear ms':>10} {'step ms':>9} {'tokens/s':>10} {'of peer':>8}")
    for r in result["rows"]:
        alone = f"{r['linear_ms']:10.3f}" if r["linear_ms"] else f"{'':10}"
        peer = f"{r['tokens_per_s'] / r['peer_tokens_per_s']:7.2f}x" if r["peer_tokens_per_s"] else ""
        print(f"{r['format']:>12} {r['activations']:>6} {r['rows']:>10} {alone} {r['step_ms']:9.3f} {r['tokens_per_s']:10.1f} {peer:>8}")


if __name__ == "__main__":
    main()
