"""Tables and the plot of a sweep, from its JSON: `python benches/gpu/sweep_report.py sweep.json [sweep.svg]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    line = "| " + " | ".join(head) + " |"
    rule = "|" + "|".join([" --- ", *[" ---: "] * (len(head) - 1)]) + "|"
    return "\n".join([f"\n### {title}\n", line, rule, *("| " + " | ".join(row) + " |" for row in rows)])


def _limits(result: Result) -> str:
    rows = [
        [
            "none" if r["limit"] is None else f"{r['limit']:,}", f"{r['share']:.0%}", r["mode"], f"{r['cold']:.1%}",
            f"{r['step_ms']:.2f}", f"{r['tokens_per_s']:.1f}", f"{r['floor_ms']:.2f}", f"{r['of_floor']:.1%}", f"{r.get('link_gb_per_s', 0):.1f}",
        ]
        for r in result["limits"]
    ]  # fmt: skip
    head = ["limit, bytes", "of the weights", "mode", "cold", "step, ms", "tokens/s", "floor, ms", "of the floor", "link, GB/s"]
    return _table("One sequence under a limit", head, rows)


def _policies(result: Result) -> str:
    rows = [
        [
            r["policy"], f"{r['share']:.0%}" if "share" in r else "", f"{r['streamed']:,.0f}", f"{r['step_ms']:.1f}",
            f"{r['tokens_per_s']:.2f}", f"{r['floor_ms']:.1f}",
            f"{r['evictions']:.1f}", "" if r["bypassed_share"] is None else f"{r['bypassed_share']:.1%}",
        ]
        for r in result["policies"]
    ]  # fmt: skip
    head = ["policy", "of the weights", "bytes a step", "step, ms", "tokens/s", "floor of its bytes, ms", "evictions a step", "bypassed"]
    return _table("The schedule against every policy", head, rows)


def _growth(result: Result) -> str:
    rows = []
    epochs = 0
    for r in result["growth"]:
        epochs += sum(r["epochs"].values())
        figures = [r["limit"], r["weights"], r["holders"]["kv"], r["holders"]["staging"]]
        rows.append([f"{r['positions']:,}", *[f"{n:,}" for n in figures], f"{r['cold']:.1%}", str(epochs), f"{r['step_ms']:.2f}"])
    head = ["positions", "limit", "weights resident", "KV", "staging", "cold", "epochs so far", "step, ms"]
    return _table("Growth", head, rows)


def _choice(result: Result) -> str:
    rows = [
        [f"{r['limit']:,}", r["asked_for"], r["mode"], f"{r['streamed']:,.0f}", f"{r['host_mapped']:,.0f}", f"{r['step_ms']:.2f}"]
        for r in result.get("choice", ())
    ]
    head = ["limit, bytes", "asked for", "mode", "copied a step", "read in place", "step, ms"]
    reasons = [f"\n{r['limit']:,}: {r['reason']}" for r in result.get("choice", ()) if r["asked_for"] == "auto"]
    return "\n".join([_table("What auto chose", head, rows), *reasons])


def _total(result: Result) -> str:
    text = ""
    for r in result["total"]:
        rows = [[name, f"{size:,}", f"{size / r['limit']:.2%}"] for name, size in r["holders"].items() if size]
        rows += [[f"of fixed: {name}", f"{size:,}", f"{size / r['limit']:.2%}"] for name, size in r["fixed_parts"] if size]
        rows.append(["unused", f"{r['limit'] - sum(r['holders'].values()):,}", ""])
        title = (
            f"{r['mode']}: {r['limit']:,} bytes in all, {r['cold']:.1%} cold, {r['step_ms']:.2f} ms a step, "
            f"{r['tokens_per_s']:.1f} tokens/s, {r['of_floor']:.1%} of the floor"
        )
        text += _table(title, ["holder", "bytes", "share"], rows)
    return text


def tables(result: Result) -> str:
    """Everything as Markdown."""
    lines = []
    if result["identity"]:
        lines.append(f"{len(result['identity'])} comparisons with the CPU, two generations each: no token differs")
    if result.get("layouts"):
        lines.append(f"{len(result['layouts'])} layouts, modes and limits against the resident run, two generations each: no token differs")
    lines += [part(result) for part in (_limits, _policies, _choice, _growth, _total)]
    for r in result["checksum"]:
        lines.append(f"\n{r['steps']} steps: {r['changed']} of {r['pieces']} resident pieces have changed, {r['cold']} were cold")
    if result["failed"]:
        lines.append(f"\nFAILED: {result['failed']}")
    return "\n".join(line for line in lines if line)


def plot(result: Result, path: Path) -> None:
    """Step time against the floor, by mode; nothing where matplotlib isn't there or nothing was measured."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot")
        return
    if not result["limits"]:
        return
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    rows = result["limits"]
    for mode, mark in (("stream", "o"), ("hybrid", "^"), ("zero-copy", "s")):
        points = sorted((r["cold"], r["step_ms"]) for r in rows if r["mode"] == mode)
        if points:
            axes.plot(*zip(*points, strict=True), marker=mark, label=mode, linewidth=1)
    floor = sorted((r["cold"], r["floor_ms"]) for r in rows)
    axes.plot(*zip(*floor, strict=True), color="black", linestyle=":", label="floor")
    axes.set_xlabel("share of the weights that crosses the link in a step")
    axes.set_ylabel("step, ms")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    result = json.loads(Path(sys.argv[1]).read_text())
    print(tables(result))
    if len(sys.argv) > 2:
        plot(result, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
