//! Every kernel against the arithmetic contract, bit for bit, on a GPU; and, with `bench`, the speed of linear layers and of decode steps.
//!
//! Prints `N passed, M failed, K skipped`; without a usable device everything is skipped, and that is counted.
//! `gpu_kernels [filter] [--quick]` runs the tests whose name contains the filter, or a few cases of some; `gpu_kernels bench [--full] [--rows=1,8,512]
//! [--contexts=512,4096] [--width=16] [--no-forms] [--no-ways]` measures and writes `kernels.json` to the directory in `OUT`;
//! `gpu_kernels attention-bench` with `--rows`, `--contexts` and `--no-forms` measures attention alone, each way to launch it.

#[path = "gpu/attention.rs"]
mod attention;
#[path = "gpu/attention_bench.rs"]
mod attention_bench;
#[path = "gpu/bench.rs"]
mod bench;
#[path = "gpu/context.rs"]
mod context;
#[path = "gpu/decode.rs"]
mod decode;
#[path = "gpu/device.rs"]
mod device;
#[path = "gpu/linear.rs"]
mod linear;
#[path = "gpu/rows.rs"]
mod rows;

use std::panic::{AssertUnwindSafe, catch_unwind};

use device::Gpu;
use headrace_ep_cuda::launch::wanted_format;
use headrace_numerics::format::Format;

type Test = (&'static str, fn(&Gpu));

const TESTS: &[Test] = &[
    ("quantise", rows::quantise),
    ("norm", rows::norm),
    ("swiglu", rows::swiglu),
    ("embed", rows::embed),
    ("argmax", rows::argmax),
    ("linear_quantised", linear::quantised),
    ("linear_extremes", linear::extremes),
    ("linear_tiles", linear::tiles),
    ("linear_dense", linear::dense),
    ("linear_segments", linear::segments),
    ("rope_append", attention::rope_append),
    ("attention", attention::attention),
    ("attention_long", attention::long),
    ("attention_prompts", attention::prompts),
    ("context_of_the_caller", context::caller_s_context),
    ("context_stacks", context::stacks_as_found),
];

/// The weight formats whose kernels a run needs: compiling all of them for the device takes a while.
fn formats(filter: &str) -> Vec<Format> {
    match filter {
        "bench" => bench::named_formats().unwrap_or_else(|| vec![wanted_format(bench::FORMATS[0].1)]),
        "linear_tiles" => linear::tiled_formats(),
        _ if filter.starts_with("attention") => Vec::new(),
        _ => device::formats(),
    }
}

fn main() {
    if std::env::args().any(|a| a == context::ALONE) {
        return context::alone();
    }
    // The standard harness's arguments (such as --nocapture) mean nothing here.
    let filter = std::env::args().skip(1).find(|a| !a.starts_with('-')).unwrap_or_default();
    let gpu = match Gpu::open(&formats(&filter)) {
        Ok(gpu) => gpu,
        Err(reason) => {
            println!("no usable CUDA device: {reason}");
            println!("0 passed, 0 failed, {} skipped", TESTS.len());
            return;
        }
    };
    println!("{}", gpu.describe());
    if filter == "attention-bench" {
        attention_bench::run(&gpu, &bench::Options::from_arguments());
        return;
    }
    if filter == "bench" {
        bench::run(&gpu, &bench::Options::from_arguments());
        return;
    }
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for (name, test) in TESTS {
        if !name.contains(&filter) {
            skipped += 1;
            continue;
        }
        let start = std::time::Instant::now();
        let ok = catch_unwind(AssertUnwindSafe(|| test(&gpu))).is_ok();
        println!("{name}: {} ({:.1} s)", if ok { "ok" } else { "FAILED" }, start.elapsed().as_secs_f64());
        if ok { passed += 1 } else { failed += 1 }
    }
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    std::process::exit(i32::from(failed > 0));
}
