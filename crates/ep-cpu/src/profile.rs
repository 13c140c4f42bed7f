//! Where a step's time goes, by kind of stage: measured on one worker, only where `HEADRACE_PROFILE_OPS=1` asks.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::compile::{Source, Work};
use headrace_provider::Buffer;

/// The variable that switches profiling on.
pub const PROFILE_VARIABLE: &str = "HEADRACE_PROFILE_OPS";

/// Kinds of stages, in the order of a layer.
const KINDS: [&str; 11] =
    ["embed", "norm", "qkv", "rope+attention", "quantise", "o/down", "gate-up", "swiglu", "head", "argmax", "step"];

/// Index of the whole step in [`KINDS`].
pub const STEP: usize = 10;

/// Index of a stage's kind in [`KINDS`].
pub fn kind(work: &Work) -> usize {
    match work {
        Work::Embed(_) => 0,
        Work::Activate(a) => match a.source {
            Source::Norm(_) => 1,
            Source::Attention => 4,
            Source::Swiglu => 7,
        },
        Work::Linear { parts, .. } => match parts.first().map(|p| p.out) {
            Some(Buffer::Qkv) => 2,
            Some(Buffer::GateUp) => 6,
            Some(Buffer::Logits) => 8,
            _ => 5,
        },
        Work::Rope(_) | Work::Attention(_) | Work::RopeAttention(_) => 3,
        Work::Argmax => 9,
    }
}

/// Sums of wall-clock nanoseconds and numbers of stages, the barrier behind a stage included.
#[derive(Debug, Default)]
pub struct Profile {
    nanos: [AtomicU64; KINDS.len()],
    count: [AtomicU64; KINDS.len()],
}

impl Profile {
    /// A profile, if the environment asks for one.
    pub fn from_environment() -> Option<Profile> {
        std::env::var_os(PROFILE_VARIABLE).filter(|v| v == "1").map(|_| Profile::default())
    }

    /// Adds the time since `since` to a kind, and starts anew from now.
    pub fn lap(&self, kind: usize, since: &mut Instant) {
        let now = Instant::now();
        self.nanos[kind].fetch_add((now - *since).as_nanos() as u64, Ordering::Relaxed);
        self.count[kind].fetch_add(1, Ordering::Relaxed);
        *since = now;
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = self.count[STEP].load(Ordering::Relaxed).max(1) as f64;
        write!(f, "time per step over {steps} steps (host clock, one worker, barriers included):")?;
        for ((name, nanos), count) in KINDS.iter().zip(&self.nanos).zip(&self.count) {
            let (nanos, count) = (nanos.load(Ordering::Relaxed) as f64, count.load(Ordering::Relaxed) as f64);
            if count > 0.0 {
                write!(f, "\n  {name:15} {:9.1} us in {:5.1} stages", nanos / steps / 1e3, count / steps)?;
            }
        }
        Ok(())
    }
}
