"""Makes the table of weight formats in docs/benchmarks/h200.md from a file that formats.py wrote.

    python benches/gpu/formats_table.py docs/benchmarks/h200/kernels.json --write

Prints the table; with `--write` it takes the place of the one between the page's marks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "h200.md"
START, END = "<!-- formats: docs/benchmarks/h200/kernels.json -->", "<!-- end of formats -->"
COUNTS = (1, 8, 32, "prompt512")


def table(data: dict[str, Any]) -> str:
    """One row a format and width of activations; in brackets the ratio to the peer's tokens/s of the same run."""
    rows = data["rows"]
    lines = ["| format | activations | GB | 1 sequence | 8 | 32 | prompt of 512 |", "| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for key in dict.fromkeys((r["format"], r["activations"]) for r in rows):
        mine = {r["rows"]: r for r in rows if (r["format"], r["activations"]) == key}
        cells = []
        for count in COUNTS:
            r = mine[count]
            peer = r["peer_tokens_per_s"]
            cells.append(f"{r['tokens_per_s']:,.0f}" + (f" ({r['tokens_per_s'] / peer:.2f}x)" if peer else ""))
        lines.append(f"| {key[0]} | {key[1]} | {mine[1]['weights_bytes'] / 1e9:.2f} | {' | '.join(cells)} |")
    head = data["header"]
    peers = ", ".join(sorted({r["peer"] for r in rows if r["peer"]}))
    lines += ["", f"Tokens/s, commit {head['commit']}, {head['card']}; in brackets the ratio to {peers} on the same file in the same run."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks/h200.md")
    a = parser.parse_args()
    text = table(json.loads(a.file.read_text(encoding="utf-8")))
    print(text)
    if a.write:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(START)
        PAGE.write_text(before + START + "\n" + text + "\n" + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
