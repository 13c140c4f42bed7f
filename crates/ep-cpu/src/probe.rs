//! What the host can do: cores, instruction sets, and how fast all cores together read memory.

use std::time::Instant;

use crate::executor::processor;
use crate::memory;
use crate::pool::default_threads;
use crate::simd::SimdLevel;

/// Bytes that one thread reads: well beyond any cache of its own.
const BYTES_A_THREAD: usize = 64 << 20;

/// Passes over them, of which the fastest counts: what a ceiling is.
const PASSES: usize = 4;

/// What the host can do.
#[derive(Clone, Debug, PartialEq)]
pub struct HostProbe {
    /// The processor's name.
    pub processor: String,
    /// Cores that this process may use, hardware threads of a core counted once.
    pub cores: usize,
    /// Hardware threads that this process may use.
    pub hardware_threads: usize,
    /// Bytes of memory that this process may take: the machine's, or its control group's.
    pub memory_bytes: u64,
    /// Kernel families that this processor can run, the best one last.
    pub kernels: Vec<String>,
    /// Instruction sets that matter here.
    pub features: Vec<&'static str>,
    /// Bytes a second that all cores together read from memory.
    pub memory_read: f64,
}

/// Instruction sets of this processor, of those that any kernel could use.
fn features() -> Vec<&'static str> {
    let mut found = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        let mut look = |there: bool, name: &'static str| found.extend(there.then_some(name));
        look(is_x86_feature_detected!("avx2"), "avx2");
        look(is_x86_feature_detected!("fma"), "fma");
        look(is_x86_feature_detected!("f16c"), "f16c");
        look(is_x86_feature_detected!("avxvnni"), "avxvnni");
        look(is_x86_feature_detected!("avx512f"), "avx512f");
        look(is_x86_feature_detected!("avx512bw"), "avx512bw");
        look(is_x86_feature_detected!("avx512dq"), "avx512dq");
        look(is_x86_feature_detected!("avx512vl"), "avx512vl");
        look(is_x86_feature_detected!("avx512vnni"), "avx512vnni");
        look(is_x86_feature_detected!("avx512vbmi"), "avx512vbmi");
        look(is_x86_feature_detected!("avx512bf16"), "avx512bf16");
    }
    found
}

/// Bytes a second that `threads` threads read together, each `bytes` of its own.
fn memory_read(threads: usize, bytes: usize) -> f64 {
    let words = bytes / 8;
    let barrier = std::sync::Barrier::new(threads);
    let (barrier, mut best) = (&barrier, 0.0f64);
    let spans: Vec<Vec<(Instant, Instant)>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(move || {
                    // Written by the thread that reads it, so that it lies near it.
                    let own: Vec<u64> = (0..words as u64).collect();
                    let pass = || {
                        barrier.wait();
                        let start = Instant::now();
                        let mut lanes = [0u64; 8];
                        for chunk in own.chunks_exact(8) {
                            for (lane, word) in lanes.iter_mut().zip(chunk) {
                                *lane = lane.wrapping_add(*word);
                            }
                        }
                        std::hint::black_box(lanes);
                        (start, Instant::now())
                    };
                    (0..PASSES).map(|_| pass()).collect::<Vec<_>>()
                })
            })
            .collect();
        workers.into_iter().filter_map(|worker| worker.join().ok()).collect()
    });
    for pass in 0..PASSES {
        let of_pass = || spans.iter().filter_map(|of_thread| of_thread.get(pass));
        let (Some(start), Some(end)) = (of_pass().map(|s| s.0).min(), of_pass().map(|s| s.1).max()) else { continue };
        let seconds = (end - start).as_secs_f64();
        if seconds > 0.0 {
            best = best.max((spans.len() * words * 8) as f64 / seconds);
        }
    }
    best
}

/// Bytes of memory that this process may use of the host.
pub fn memory_bytes() -> u64 {
    memory::memory_bytes() as u64
}

/// Measures the host. Takes under a second, and 64 MiB a core for that time, or an eighth of the memory where that is less.
pub fn probe() -> HostProbe {
    let (cores, memory) = (default_threads(), memory::memory_bytes());
    HostProbe {
        processor: processor(),
        cores,
        hardware_threads: std::thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: memory as u64,
        kernels: SimdLevel::available().iter().map(SimdLevel::to_string).collect(),
        features: features(),
        memory_read: memory_read(cores, BYTES_A_THREAD.min(memory / 8 / cores)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_has_a_speed() {
        let one = memory_read(1, 1 << 20);
        assert!(one > 1e6 && one.is_finite(), "{one}");
        let host = probe();
        assert!(host.memory_read > 1e6 && host.cores >= 1 && host.hardware_threads >= host.cores, "{host:?}");
        assert_eq!(host.kernels.first().map(String::as_str), Some("scalar"));
        assert_eq!(host.kernels.len() > 1, host.features.contains(&"avx2"));
    }
}
