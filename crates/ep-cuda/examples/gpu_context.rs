//! What a context costs on the card before anything is allocated, by parts: `cargo run --release --example gpu_context [CARD]`.
//!
//! Each part is made in turn, and the growth of the card's used memory is printed, by NVML and by the driver. A child process
//! is one setting: the driver's defaults, then with other limits and environments. Without a card it says so.

use std::sync::Arc;

use cudarc::driver::sys;
use headrace_ep_cuda::context::Context;
use headrace_ep_cuda::driver::Driver;
use headrace_ep_cuda::host_memory::PinnedBuffer;
use headrace_ep_cuda::kernel_launcher::KernelLauncher;
use headrace_ep_cuda::nvml::Monitor;
use headrace_ep_cuda::stream::Streams;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::format::{Format, Nbits, ScaleType, ZeroPoint};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Settings, each with the environment of its process.
const SETTINGS: [(&str, &[(&str, &str)]); 6] = [
    ("defaults", &[]),
    ("small-limits", &[]),
    ("one-connection", &[("CUDA_DEVICE_MAX_CONNECTIONS", "1")]),
    ("eager-modules", &[("CUDA_MODULE_LOADING", "EAGER")]),
    ("lazy-modules", &[("CUDA_MODULE_LOADING", "LAZY")]),
    (
        "small-limits one-connection lazy-modules",
        &[("CUDA_DEVICE_MAX_CONNECTIONS", "1"), ("CUDA_MODULE_LOADING", "LAZY")],
    ),
];

struct Meter {
    monitor: Option<Monitor>,
    last: u64,
}

impl Meter {
    fn say(&mut self, part: &str, context: Option<&Context>) -> Outcome<()> {
        let now = self.monitor.as_ref().and_then(Monitor::card_bytes).unwrap_or_default();
        let process = self.monitor.as_ref().and_then(Monitor::process_bytes);
        let free = context.map(Context::memory_info).transpose()?.map(|(free, _)| free);
        let grown = i128::from(now) - i128::from(self.last);
        println!("  {part:<34} {grown:>13}  card {now:>13}  process {process:?}  free {free:?}");
        self.last = now;
        Ok(())
    }
}

fn limit(context: &Arc<Context>, which: sys::CUlimit, bytes: usize) -> Outcome<()> {
    let _current = context.bind()?;
    // SAFETY: a context is current; the call changes a limit of it.
    let result = unsafe { sys::cuCtxSetLimit(which, bytes) };
    println!("  {which:?} = {bytes}: {result:?}");
    Ok(())
}

fn measure(ordinal: usize, setting: &str) -> Outcome<()> {
    println!("{setting}:");
    let card = Driver::load()?.usable_card(ordinal)?;
    let monitor = Monitor::open(&card.bus_id);
    let mut meter = Meter { last: 0, monitor };
    meter.say("before", None)?;
    let context: Arc<Context> = Context::open(ordinal)?;
    let _current = context.bind()?;
    meter.say("context", Some(&context))?;
    for (name, which) in [
        ("stack", sys::CUlimit::CU_LIMIT_STACK_SIZE),
        ("printf", sys::CUlimit::CU_LIMIT_PRINTF_FIFO_SIZE),
        ("heap", sys::CUlimit::CU_LIMIT_MALLOC_HEAP_SIZE),
    ] {
        let mut value = 0;
        // SAFETY: a context is current; the call writes one integer.
        let result = unsafe { sys::cuCtxGetLimit(&mut value, which) };
        println!("  limit {name} {value} {result:?}");
    }
    if setting.contains("small-limits") {
        limit(&context, sys::CUlimit::CU_LIMIT_STACK_SIZE, 16)?;
        limit(&context, sys::CUlimit::CU_LIMIT_PRINTF_FIFO_SIZE, 1024)?;
        limit(&context, sys::CUlimit::CU_LIMIT_MALLOC_HEAP_SIZE, 1024)?;
        meter.say("smaller limits", Some(&context))?;
    }
    let streams = Streams::new(&context)?;
    meter.say("streams", Some(&context))?;
    let mut launcher = KernelLauncher::open(&context)?;
    meter.say("kernels of every model", Some(&context))?;
    let format = Format::Nbits(Nbits { bits: 4, block: 32, scale: ScaleType::F16, zero: ZeroPoint::Midpoint });
    launcher.prepare(ActivationWidth::Int16, &[format], None)?;
    meter.say("kernels of one format", Some(&context))?;
    launcher.prepare(ActivationWidth::Int8, &[format], None)?;
    meter.say("the same for int8 activations", Some(&context))?;
    let pinned = PinnedBuffer::new(&context, 64 << 20)?;
    meter.say("64 MiB of pinned host memory", Some(&context))?;
    let mut first = 0u64;
    // SAFETY: a context is current; what is allocated is freed below.
    let result = unsafe { sys::cuMemAlloc_v2(&mut first, 2 << 20) };
    meter.say(&format!("one allocation of 2 MiB ({result:?})"), Some(&context))?;
    // SAFETY: both are there for 1 MiB, and the stream is waited for.
    unsafe { streams.compute.copy_in(first, pinned.as_ptr(), 1 << 20) }?;
    streams.compute.wait()?;
    meter.say("a first copy", Some(&context))?;
    // SAFETY: allocated above, used by nothing any more.
    unsafe { sys::cuMemFree_v2(first) };
    Ok(())
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let ordinal = arguments.get(1).map_or(Ok(0), |a| a.parse())?;
    if let Some(setting) = arguments.get(2) {
        return measure(ordinal, setting);
    }
    if let Err(problem) = Driver::load() {
        println!("0 passed, 0 failed, 1 skipped: {problem}");
        return Ok(());
    }
    for (setting, environment) in SETTINGS {
        let mut child = std::process::Command::new(std::env::current_exe()?);
        child.arg(ordinal.to_string()).arg(setting).envs(environment.iter().copied()).status()?;
    }
    Ok(())
}
