"""Compiles kernels/*.cu to PTX with NVRTC and assembles them with ptxas for every supported architecture.

Prints registers, spills and shared memory of each kernel; exits with 1 if a kernel spills or does not assemble.
Needs the Python packages nvidia-cuda-nvrtc-cu12 and nvidia-cuda-nvcc-cu12, nothing else: no GPU, no toolkit.

    python crates/ep-cuda/tools/compile.py [--quiet] [--allow-spills] [--ptx target/headrace-ptx] [kernel.cu ...]

With --ptx, what cargo's build has compiled since the last change of any source is assembled as it is: that is what ships.
"""

import argparse
import concurrent.futures
import ctypes
import glob
import os
import re
import subprocess
import sys
import tempfile

# PTX target -> the architectures it is assembled for.
TARGETS = {"75": ["75"], "80": ["80", "86", "89"], "90": ["90"]}
KERNELS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "kernels")
OPTIONS = ["--std=c++17", "-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false", "-default-device"]


def package_file(pattern):
    for root in sys.path:
        found = sorted(glob.glob(os.path.join(root, "nvidia", pattern)))
        if found:
            return found[0]
    sys.exit(f"not found: nvidia/{pattern}; pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-nvcc-cu12")


def jobs(names):
    """Modules: (name, source file, extra options). Files that mention FORMAT give one for each format class."""
    with open(os.path.join(KERNELS, "formats.txt"), encoding="utf-8") as f:
        formats = [line.split(maxsplit=2) for line in f if line.strip() and not line.startswith("#")]
    for source in names:
        with open(os.path.join(KERNELS, source), encoding="utf-8") as f:
            generic = "(FORMAT)" in f.read()
        if not generic:
            yield source[:-3], source, []
            continue
        for name, options, cpp in formats:
            defines = [f"-D{o}" for o in options.split(",") if o != "-"]
            yield f"{source[:-3]}.{name}", source, [f"-DFORMAT={cpp.strip()}", *defines]


def architecture(source, target):
    """Files that use what only compute capability 9.0 has are compiled for that alone."""
    return "90a" if target == "90" and source == "linear_wide.cu" else target


def ptx(lib, source, extra, target):
    with open(os.path.join(KERNELS, source), encoding="utf-8") as f:
        text = f.read().encode()
    prog = ctypes.c_void_p()
    lib.nvrtcCreateProgram(ctypes.byref(prog), text, source.encode(), 0, None, None)
    options = [o.encode() for o in [*OPTIONS, *extra, f"-arch=compute_{architecture(source, target)}", f"-I{KERNELS}"]]
    rc = lib.nvrtcCompileProgram(prog, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    lib.nvrtcGetProgramLogSize(prog, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(prog, log)
    if log.value.strip():
        print(log.value.decode(), file=sys.stderr)
    if rc:
        raise SystemExit(f"{source} for compute_{target}: NVRTC error {rc}")
    lib.nvrtcGetPTXSize(prog, ctypes.byref(size))
    out = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetPTX(prog, out)
    lib.nvrtcDestroyProgram(ctypes.byref(prog))
    return out.value


def built(directory, module, target):
    """What cargo's build keeps of a module, if that is newer than every source; else None."""
    changed = max(os.path.getmtime(path) for path in glob.glob(os.path.join(KERNELS, "*")))
    kept = glob.glob(os.path.join(glob.escape(directory), f"{module}.{target}.*.ptx"))
    newest = max(kept, key=os.path.getmtime, default=None)
    if newest is None or os.path.getmtime(newest) < changed:
        return None
    with open(newest, "rb") as f:
        return f.read().rstrip(b"\0")


def one(job):
    (module, source, extra), target, directory = job
    code = built(directory, module, target) if directory else None
    if code is None:
        lib = ctypes.CDLL(package_file("cuda_nvrtc/lib/libnvrtc.so.*"))
        code = ptx(lib, source, extra, target)
    lines, bad = [], 0
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "k.ptx")
        with open(path, "wb") as f:
            f.write(code)
        for arch in TARGETS[target]:
            done = subprocess.run(
                [package_file("cuda_nvcc/bin/ptxas"), "-v", f"-arch=sm_{architecture(source, arch)}", path, "-o", os.path.join(tmp, "k")],
                capture_output=True,
                text=True,
            )
            if done.returncode:
                return [f"{module} sm_{arch}: {done.stderr}"], 1
            name, spill = "", ""
            for line in done.stderr.splitlines():
                if m := re.search(r"Compiling entry function '(\w+)'", line):
                    name = m.group(1)
                elif "spill" in line:
                    spill = "" if " 0 bytes spill stores, 0 bytes spill loads" in line else line.strip()
                elif m := re.search(r"Used (\d+) registers", line):
                    stack = spill and f"  SPILLS: {spill}"
                    bad += bool(spill)
                    lines.append(f"sm_{arch} {module:18} {name:30} {m.group(1):>4} registers{stack}")
    return lines, bad


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allow-spills", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="print only kernels that spill or fail, and the count")
    parser.add_argument("--target", choices=sorted(TARGETS))
    parser.add_argument("--ptx", metavar="DIRECTORY", help="where cargo's build keeps what it has compiled")
    parser.add_argument("kernels", nargs="*")
    args = parser.parse_args()
    names = args.kernels or sorted(os.path.basename(p) for p in glob.glob(os.path.join(KERNELS, "*.cu")))
    targets = [args.target] if args.target else sorted(TARGETS)
    failures, kernels = 0, 0
    with concurrent.futures.ProcessPoolExecutor() as pool:
        for lines, bad in pool.map(one, [(j, t, args.ptx) for t in targets for j in jobs(names)]):
            shown = [line for line in lines if bad or not args.quiet]
            if shown:
                print("\n".join(shown), flush=True)
            kernels += len(lines)
            failures += bad
    architectures = ", ".join(f"sm_{arch}" for target in targets for arch in TARGETS[target])
    print(f"{kernels} kernels assembled for {architectures}; {failures} spill or fail")
    if not kernels:
        sys.exit("nothing was assembled")
    sys.exit(bool(failures) and not args.allow_spills)


if __name__ == "__main__":
    main()
