//! Compiles `kernels/*.cu` to PTX with NVRTC, for every supported target, and writes a table of them for `src/ptx.rs`.
//!
//! NVRTC is a library of the PyPI package `nvidia-cuda-nvrtc-cu12`; no CUDA toolkit is needed. It is looked for in
//! `HEADRACE_NVRTC` (the library's path), then among the packages of the Python that builds the wheel (`PYO3_PYTHON`,
//! the environment in `VIRTUAL_ENV`, `python3`, `python`), then in `CUDA_PATH`, `CUDA_HOME` and `/usr/local/cuda`. For a
//! build by cargo alone:
//!
//! ```text
//! pip install nvidia-cuda-nvrtc-cu12 && cargo build -p headrace-ep-cuda
//! ```
//!
//! A module is compiled once for its source, the headers it includes, its options and the library: the result is kept in
//! `headrace-ptx` of cargo's target directory, for every profile and feature, or in `HEADRACE_PTX_CACHE`.
//! `HEADRACE_PTX_TARGETS` (such as `90`, or `80,90`) leaves other targets out, for quick builds while kernels are written.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// PTX targets: the oldest supported architecture; integer tensor cores and asynchronous copies; dependent launches.
const TARGETS: [u32; 3] = [75, 80, 90];

/// No contraction and no shortcuts: the contract says where a fused operation stands.
const OPTIONS: [&str; 6] =
    ["--std=c++17", "-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false", "-default-device"];

type Res<T> = Result<T, String>;

fn main() {
    println!("cargo::rerun-if-changed=kernels");
    for name in [
        "HEADRACE_NVRTC",
        "HEADRACE_PTX_TARGETS",
        "HEADRACE_PTX_CACHE",
        "PYO3_PYTHON",
        "VIRTUAL_ENV",
        "CUDA_PATH",
        "CUDA_HOME",
    ] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    if let Err(message) = build() {
        for line in message.lines() {
            println!("cargo::error={line}");
        }
        std::process::exit(1);
    }
}

fn env_path(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from)
}

fn build() -> Res<()> {
    let out = env_path("OUT_DIR").ok_or("OUT_DIR is not set")?;
    let table = out.join("ptx_table.rs");
    if std::env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return write(&table, "&[]".as_bytes());
    }
    let dir = env_path("CARGO_MANIFEST_DIR").ok_or("CARGO_MANIFEST_DIR is not set")?.join("kernels");
    let modules = modules(&dir)?;
    let targets = targets()?;
    let library = find_nvrtc()?;
    let headers = headers(&dir)?;
    // OUT_DIR is TARGET/PROFILE/build/PACKAGE/out, with one more level before PROFILE if a platform is named.
    let cache = env_path("HEADRACE_PTX_CACHE").or_else(|| Some(out.ancestors().nth(4)?.join("headrace-ptx")));
    let cache = cache.ok_or_else(|| format!("{}: not a build directory of cargo", out.display()))?;
    std::fs::create_dir_all(&cache).map_err(|e| format!("{}: {e}", cache.display()))?;
    let nvrtc = Nvrtc::load(&library)?;
    let jobs: Vec<(&ModuleSource, u32)> = targets.iter().flat_map(|&t| modules.iter().map(move |m| (m, t))).collect();

    // Compilations of different programs may run at once.
    let (next, errors) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(&(module, target)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let path = out.join(format!("{}.{target}.ptx", module.name));
                    let key = module.key(&headers, &library);
                    let kept = cache.join(format!("{}.{target}.{key}.ptx", module.name));
                    let done = match std::fs::read(&kept) {
                        Ok(ptx) => write(&path, &ptx),
                        Err(_) => nvrtc.compile(&dir, module, target).and_then(|ptx| {
                            write(&path, &ptx)?;
                            keep(&kept, &ptx)
                        }),
                    };
                    if let (Err(message), Ok(mut errors)) = (done, errors.lock()) {
                        errors.push(message);
                    }
                }
            });
        }
    });
    let errors = errors.into_inner().map_err(|_| "a compiling thread failed")?;
    if !errors.is_empty() {
        return Err(errors.join("\n"));
    }

    let mut text = String::from("&[\n");
    for target in targets {
        text += &format!("    Target {{ capability: {target}, modules: &[\n");
        for ModuleSource { name, .. } in &modules {
            text += &format!(
                "        Module {{ name: {name:?}, ptx: include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.{target}.ptx\")) }},\n"
            );
        }
        text += "    ] },\n";
    }
    write(&table, (text + "]\n").as_bytes())
}

/// One module: a file of kernels, for one format class where the file is written for any.
struct ModuleSource {
    name: String,
    text: String,
    options: Vec<String>,
}

impl ModuleSource {
    /// Changes whenever the module's PTX may.
    fn key(&self, headers: &BTreeMap<String, String>, library: &Path) -> String {
        let mut used = BTreeMap::new();
        include(&self.text, headers, &mut used);
        let mut hasher = DefaultHasher::new();
        (&self.text, &self.options, used, library, OPTIONS).hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    }
}

/// Modules that use what only compute capability 9.0 has are compiled for that alone.
fn architecture(module: &str, target: u32) -> String {
    if target == 90 && module.starts_with("linear_wide.") { "90a".to_owned() } else { target.to_string() }
}

/// The targets to compile for.
fn targets() -> Res<Vec<u32>> {
    let Some(list) = std::env::var("HEADRACE_PTX_TARGETS").ok().filter(|l| !l.is_empty()) else {
        return Ok(TARGETS.to_vec());
    };
    let chosen: Vec<u32> = TARGETS.into_iter().filter(|t| list.split(',').any(|l| l == t.to_string())).collect();
    if chosen.is_empty() {
        return Err(format!("HEADRACE_PTX_TARGETS: {list:?} names none of {TARGETS:?}"));
    }
    Ok(chosen)
}

/// All headers by name.
fn headers(dir: &Path) -> Res<BTreeMap<String, String>> {
    let entries = std::fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "cuh"))
        .map(|path| {
            let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
            Ok((path.file_name().unwrap_or_default().to_string_lossy().into_owned(), text))
        })
        .collect()
}

/// Collects the headers that `text` includes, and those that they include.
fn include<'a>(text: &str, headers: &'a BTreeMap<String, String>, used: &mut BTreeMap<&'a str, &'a str>) {
    let names = text.lines().filter_map(|line| line.strip_prefix("#include \"")?.split('"').next());
    for (name, text) in names.filter_map(|name| headers.get_key_value(name)) {
        if used.insert(name, text).is_none() {
            include(text, headers, used);
        }
    }
}

/// Keeps a compiled module for later builds. Another build may be doing the same.
fn keep(path: &Path, ptx: &[u8]) -> Res<()> {
    let own = path.with_extension(format!("{}.{:?}", std::process::id(), std::thread::current().id()));
    write(&own, ptx)?;
    std::fs::rename(&own, path).map_err(|e| format!("{}: {e}", path.display()))
}

/// All modules. A file that mentions `(FORMAT)` gives one for each line of `formats.txt`.
fn modules(dir: &Path) -> Res<Vec<ModuleSource>> {
    let read = |name: &str| {
        let path = dir.join(name);
        std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))
    };
    let formats = read("formats.txt")?;
    let formats: Vec<(&str, &str, &str)> = formats
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| {
            let mut words = line.splitn(3, ' ');
            Some((words.next()?, words.next()?, words.next()?))
        })
        .collect();
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .map_err(|e| format!("{}: {e}", dir.display()))?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.ends_with(".cu"))
        .collect();
    names.sort();
    let mut modules = Vec::new();
    for name in &names {
        let (text, stem) = (read(name)?, name.trim_end_matches(".cu"));
        if !text.contains("(FORMAT)") {
            modules.push(ModuleSource { name: stem.to_owned(), text, options: Vec::new() });
            continue;
        }
        for &(class, switches, cpp) in &formats {
            let mut options = vec![format!("-DFORMAT={cpp}")];
            options.extend(switches.split(',').filter(|s| *s != "-").map(|s| format!("-D{s}")));
            modules.push(ModuleSource { name: format!("{stem}.{class}"), text: text.clone(), options });
        }
    }
    Ok(modules)
}

fn write(path: &Path, bytes: &[u8]) -> Res<()> {
    std::fs::write(path, bytes).map_err(|e| format!("{}: {e}", path.display()))
}

/// The library's path, or a message that says where it was looked for.
fn find_nvrtc() -> Res<PathBuf> {
    if let Some(path) = env_path("HEADRACE_NVRTC") {
        return if path.is_file() { Ok(path) } else { Err(format!("HEADRACE_NVRTC: no file {}", path.display())) };
    }
    let mut pythons: Vec<PathBuf> = env_path("PYO3_PYTHON").into_iter().collect();
    if let Some(env) = env_path("VIRTUAL_ENV") {
        pythons.extend([env.join("bin/python"), env.join("Scripts/python.exe")]);
    }
    pythons.extend(["python3", "python"].map(PathBuf::from));
    let mut roots: Vec<PathBuf> = Vec::new();
    for python in &pythons {
        let Ok(done) = Command::new(python).args(["-c", "import sys; print('\\n'.join(sys.path))"]).output() else {
            continue;
        };
        for line in String::from_utf8_lossy(&done.stdout).lines().filter(|line| !line.is_empty()) {
            for version in ["cu13", "cuda_nvrtc"] {
                roots.push(Path::new(line).join("nvidia").join(version));
            }
        }
    }
    roots.extend(["CUDA_PATH", "CUDA_HOME"].iter().filter_map(|name| env_path(name)));
    roots.push(PathBuf::from("/usr/local/cuda"));
    for root in &roots {
        for sub in ["lib", "lib64", "bin"] {
            let found = std::fs::read_dir(root.join(sub)).into_iter().flatten().filter_map(|entry| {
                let name = entry.ok()?.file_name().into_string().ok()?;
                let library = name.starts_with("libnvrtc.so") || name.starts_with("nvrtc64_") && name.ends_with(".dll");
                (library && !name.contains("alt")).then(|| root.join(sub).join(name))
            });
            if let Some(path) = found.min() {
                return Ok(path);
            }
        }
    }
    Err("NVRTC was not found: it compiles the CUDA kernels. Run `pip install nvidia-cuda-nvrtc-cu12` in the Python on PATH, \
         or set HEADRACE_NVRTC to the library's path, or build without the feature `cuda`."
        .to_owned())
}

type Program = *mut c_void;

/// The functions used of NVRTC.
struct Nvrtc {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ptx_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    ptx: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    /// Keeps the functions valid.
    _library: libloading::Library,
}

impl Nvrtc {
    fn load(path: &Path) -> Res<Self> {
        let fail = |e: libloading::Error| format!("{}: {e}", path.display());
        // SAFETY: NVRTC's initialisers have no requirements; the signatures are those of nvrtc.h.
        unsafe {
            let library = libloading::Library::new(path).map_err(fail)?;
            Ok(Nvrtc {
                create: *library.get(b"nvrtcCreateProgram\0").map_err(fail)?,
                compile: *library.get(b"nvrtcCompileProgram\0").map_err(fail)?,
                log_size: *library.get(b"nvrtcGetProgramLogSize\0").map_err(fail)?,
                log: *library.get(b"nvrtcGetProgramLog\0").map_err(fail)?,
                ptx_size: *library.get(b"nvrtcGetPTXSize\0").map_err(fail)?,
                ptx: *library.get(b"nvrtcGetPTX\0").map_err(fail)?,
                destroy: *library.get(b"nvrtcDestroyProgram\0").map_err(fail)?,
                _library: library,
            })
        }
    }

    /// PTX of one file for one target, with the terminating zero.
    fn compile(&self, dir: &Path, module: &ModuleSource, target: u32) -> Res<Vec<u8>> {
        let name = &module.name;
        let c = |s: String| CString::new(s).map_err(|e| format!("{name}: {e}"));
        let (text, c_name) = (c(module.text.clone())?, c(name.clone())?);
        let mut options = OPTIONS.map(str::to_owned).to_vec();
        options.extend(module.options.iter().cloned());
        options.extend([format!("-arch=compute_{}", architecture(name, target)), format!("-I{}", dir.display())]);
        let options = options.into_iter().map(c).collect::<Res<Vec<CString>>>()?;
        let option_ptrs: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: all strings outlive the calls and end in zero; buffers have the sizes that NVRTC asked for.
        unsafe {
            let rc = (self.create)(&mut program, text.as_ptr(), c_name.as_ptr(), 0, std::ptr::null(), std::ptr::null());
            if rc != 0 {
                return Err(format!("{name}: nvrtcCreateProgram failed with {rc}"));
            }
            let rc = (self.compile)(program, option_ptrs.len() as c_int, option_ptrs.as_ptr());
            let result = if rc == 0 {
                read(self.ptx_size, self.ptx, program)
            } else {
                let log = read(self.log_size, self.log, program).unwrap_or_default();
                let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
                Err(format!("{name} for compute_{target}: NVRTC error {rc}\n{log}"))
            };
            (self.destroy)(&mut program);
            result
        }
    }
}

/// # Safety
/// `size` and `get` belong together and `program` is theirs.
unsafe fn read(
    size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    get: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    program: Program,
) -> Res<Vec<u8>> {
    let mut n = 0usize;
    // SAFETY: by this function's contract; the buffer is as long as NVRTC says.
    unsafe {
        if size(program, &mut n) != 0 {
            return Err("NVRTC has no result".to_owned());
        }
        let mut bytes = vec![0u8; n];
        if get(program, bytes.as_mut_ptr().cast()) != 0 {
            return Err("NVRTC gave no result".to_owned());
        }
        Ok(bytes)
    }
}
