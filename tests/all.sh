#!/usr/bin/env bash
# Passes everything that must pass: format, lints, Rust tests, docs, the wheel, Python tests against the wheel, types.
# Sets up all it needs in .venv-test and dist; needs Rust (cargo, clippy, rustfmt) and Python 3.10 or later.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
start=$SECONDS
step() { printf '\n== %s (%d s)\n' "$1" "$((SECONDS - start))"; }

step "format"
cargo fmt --all -- --check

step "lints"
cargo clippy --workspace --all-targets --locked -- -D warnings

step "Rust tests"
cargo test --workspace --locked

step "Rust docs"
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet

step "wheel"
"$python" -m venv --clear .venv-test
.venv-test/bin/python -m pip install --quiet --upgrade pip
rm -rf dist
.venv-test/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist .
wheel=$(ls dist/headrace-*.whl)
case "$wheel" in
*-cp310-abi3-*) ;;
*) echo "not an abi3 wheel for Python 3.10: $wheel" >&2 && exit 1 ;;
esac
.venv-test/bin/python -m pip install --quiet "$wheel[test]"

step "types and stubs"
(cd tests && ../.venv-test/bin/python -m mypy --strict --package headrace)
(cd tests && ../.venv-test/bin/python -m mypy.stubtest headrace._core --concise)

step "Python tests against the wheel"
.venv-test/bin/python -m pytest

step "done"
