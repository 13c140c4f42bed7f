"""The README's table of figures, from a JSON that `run.py --shape 14b` wrote: `python benches/gpu/readme_table.py FILE [--write]`.

Prints the lines between the README's markers; `--write` puts them there, and FILE into the marker. A test compares the README
with what this prints for the file that it names.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from header import ROOT, is_release  # noqa: E402  (benches/header.py)

from instruments import HBM, LINK  # noqa: E402

SHAPE, ACTIVATIONS = "14b", "int16"
BEGIN, END = "<!-- figures: {} -->", "<!-- end of figures -->"
BLOCK = re.compile(r"<!-- figures: (\S+) -->\n(.*?)<!-- end of figures -->\n", re.DOTALL)

Row = dict[str, Any]


def rows_of(result: Row) -> tuple[list[Row], list[list[str]]]:
    """The rows of the file that are shown, and the table's rows."""
    rows = [r for r in result["times"] if r["shape"] == SHAPE and r["activations"] == ACTIVATIONS and "prefill" not in r and "context" not in r]
    resident = {r["sequences"]: r for r in rows if not r.get("limit")}
    batches = {r["sequences"]: r for r in rows if r.get("limit") and "streamed_per_token" in r}
    single = sorted((r for r in rows if r.get("limit") and "streamed_per_token" not in r), key=lambda r: r["cold"])
    some_cold = [{1: r} for r in single if 0.2 <= r["cold"] <= 0.4][:1]
    groups = [resident, *some_cold, batches, {1: single[-1]}]
    table = []
    for group in groups:
        one = group[1]
        limit = f"{one['limit'] / 1e9:.2f} GB" if one.get("limit") else "none"
        bound = f"the link: {one['link_gb_per_s']:.1f} of {LINK} GB/s" if one.get("limit") else f"memory: {one['weights_gb_per_s']:,.0f} of {HBM:,.0f} GB/s"
        rates = [f"{group[n]['tokens_per_s']:,.{0 if group[n]['tokens_per_s'] >= 100 else 1}f}" if n in group else "" for n in (1, 8, 32)]
        table.append([limit, f"{one['cold']:.0%}", *rates, bound])
    return [r for group in groups for r in group.values()], table


def block(result: Row, name: str) -> str:
    """The table with what must be said of it. `name`: the file, as the README links to it."""
    shown, table = rows_of(result)
    head = result["header"]
    lines = ["| limit | cold | one sequence, tokens/s | 8 sequences | 32 sequences | what bounds one sequence |", "| ---: | ---: | ---: | ---: | ---: | --- |"]
    lines += ["| " + " | ".join(row) + " |" for row in table]
    said = []
    if not is_release(head):
        said.append("**Taken from a build with debug assertions**, and to be taken again from a release build.")
    limited = [r for r in shown if r.get("limit")]
    if all(r.get("tokens_equal") for r in limited):
        said.append("The tokens under each limit were compared with those without one, and are the same.")
    else:
        said.append("This run did not compare tokens; those that did are in [h200.md](docs/benchmarks/h200.md#bits).")
    said.append(f"[{Path(name).name}]({name}), commit {head['commit']}.")
    return "\n".join([*lines, "", *said, ""])


def main() -> None:
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["--write"]):
        sys.exit(f"usage: {__doc__}")
    path = Path(sys.argv[1]).resolve()
    name = str(path.relative_to(ROOT))
    text = block(json.loads(path.read_text(encoding="utf-8")), name)
    if sys.argv[2:] != ["--write"]:
        print(text, end="")
        return
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after, count = BLOCK.subn(lambda _: f"{BEGIN.format(name)}\n{text}{END}\n", before)
    if count != 1:
        sys.exit(f"README.md has {count} blocks of figures, must have one")
    readme.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
