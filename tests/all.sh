#!/usr/bin/env bash
# Passes everything that must pass: format, lints, the wheel, Rust tests, docs, types, Python tests against the wheel.
# Sets up all it needs in .venv-test and dist; needs Rust (cargo, clippy, rustfmt) and Python 3.10 or later.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
start=$SECONDS
step() { printf '\n== %s (%d s)\n' "$1" "$((SECONDS - start))"; }
# As in the test profile, so that what lints need to run (build scripts, which compile the CUDA kernels) is run once for both.
export CARGO_PROFILE_DEV_OPT_LEVEL=2

step "tools"
"$python" -m venv --clear .venv-test
venv=$PWD/.venv-test/bin
"$venv/python" -m pip install --quiet --upgrade pip
# The compiler of the CUDA kernels: cargo needs it wherever it builds that crate, with or without a GPU.
"$venv/python" -m pip install --quiet 'nvidia-cuda-nvrtc-cu12>=12.4,<13'
HEADRACE_NVRTC=$(echo "$PWD"/.venv-test/lib/python3*/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12)
export HEADRACE_NVRTC

step "format"
cargo fmt --all -- --check

step "lints"
cargo clippy --workspace --all-targets --locked -- -D warnings

step "Rust docs"
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet

step "wheel"
rm -rf dist
"$venv/python" -m pip wheel --quiet --no-deps --wheel-dir dist .
wheel=$(ls dist/headrace-*.whl)
case "$wheel" in
*-cp310-abi3-*) ;;
*) echo "not an abi3 wheel for Python 3.10: $wheel" >&2 && exit 1 ;;
esac
"$venv/python" -m pip install --quiet "$wheel[test]"

step "every CUDA kernel assembled for every architecture"
"$venv/python" crates/ep-cuda/tools/compile.py --quiet --ptx target/headrace-ptx

step "types and stubs"
(cd tests && "$venv/python" -m mypy --strict --package headrace)
(cd tests && "$venv/python" -m mypy.stubtest headrace._core --concise)

step "Rust tests"
HEADRACE_SMOLLM2_GGUF=$("$venv/headrace" fetch smollm2-135m)
export HEADRACE_SMOLLM2_GGUF
cargo test --workspace --locked
# Those that need the demo model are ignored otherwise.
cargo test -p headrace-model --locked --test gguf --test tokenizer -- --ignored real:: golden:: smollm2

step "every interleaving of the memory governor"
RUSTFLAGS="--cfg loom" cargo test -p headrace-memory-governor --test loom --locked --target-dir target/loom

step "Python tests against the wheel"
"$venv/python" -m pytest

step "timings of the public surface: once each, not judged"
"$venv/python" -m pytest -q benches/python --benchmark-disable

step "done"
