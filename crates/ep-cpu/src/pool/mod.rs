//! The team of threads that computes a step: rayon keeps the threads, one broadcast a step runs all of them.

pub mod barrier;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

pub use barrier::{Barrier, Poisoned};

/// A fixed number of workers. With one worker nothing is spawned and a step runs on the caller's thread.
#[derive(Debug)]
pub struct Team {
    threads: usize,
    pool: Option<rayon::ThreadPool>,
}

/// Physical cores that this process may use: the affinity mask and the cgroup's quota count, a core's second hardware
/// thread does not, because two of them share the units that the kernels keep busy. At least 1.
pub fn default_threads() -> usize {
    let logical = std::thread::available_parallelism().map_or(1, usize::from);
    let per_core = threads_per_core();
    logical.div_ceil(per_core).max(1)
}

/// Hardware threads of a core, from the first processor's entry in Linux's sysfs; 1 where it isn't known.
fn threads_per_core() -> usize {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list");
    list.map_or(1, |text| siblings(text.trim())).max(1)
}

/// Number of processors in a list such as `0,64` or `0-1`.
fn siblings(list: &str) -> usize {
    list.split(',')
        .filter_map(|part| {
            let (from, to) = part.split_once('-').unwrap_or((part, part));
            let (from, to) = (from.parse::<usize>().ok()?, to.parse::<usize>().ok()?);
            Some(to.saturating_sub(from) + 1)
        })
        .sum()
}

impl Team {
    /// Starts `threads` workers (at least one). The error is the operating system's.
    pub fn new(threads: usize) -> Result<Team, String> {
        let threads = threads.max(1);
        let pool = if threads == 1 {
            None
        } else {
            let builder = rayon::ThreadPoolBuilder::new().num_threads(threads);
            Some(builder.thread_name(|i| format!("headrace-cpu-{i}")).build().map_err(|e| e.to_string())?)
        };
        Ok(Team { threads, pool })
    }

    /// Number of workers.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `work(index, barrier)` once on every worker and waits for all of them. A worker that fails or panics
    /// poisons the barrier, so that the others leave; the first failure's text comes back.
    pub fn run(&self, work: impl Fn(usize, &Barrier) -> Result<(), String> + Sync) -> Result<(), String> {
        let barrier = Barrier::new(self.threads);
        let failure: Mutex<Option<String>> = Mutex::new(None);
        let one = |index: usize| {
            let what = match catch_unwind(AssertUnwindSafe(|| work(index, &barrier))) {
                Ok(Ok(())) => return,
                Ok(Err(what)) => what,
                Err(payload) => format!("worker {index} panicked: {}", panic_text(payload.as_ref())),
            };
            // Workers that merely saw the poison find the failure recorded already.
            let mut slot = failure.lock().unwrap_or_else(|e| e.into_inner());
            slot.get_or_insert(what);
            drop(slot);
            barrier.poison();
        };
        match &self.pool {
            None => one(0),
            Some(pool) => {
                pool.broadcast(|worker| one(worker.index()));
            }
        }
        match failure.into_inner().unwrap_or_else(|e| e.into_inner()) {
            None => Ok(()),
            Some(what) => Err(what),
        }
    }
}

fn panic_text(payload: &(dyn std::any::Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panicking_worker_fails_the_step_and_the_next_step_works() {
        let team = Team::new(3).unwrap();
        let failed = team.run(|i, barrier| {
            assert!(i != 1, "broken on purpose");
            barrier.wait().map_err(|_| "poisoned".to_string())
        });
        assert!(failed.unwrap_err().contains("broken on purpose"));
        team.run(|_, barrier| barrier.wait().map_err(|_| "poisoned".to_string())).unwrap();
    }

    #[test]
    fn lists_of_siblings() {
        assert_eq!((siblings("0"), siblings("0,64"), siblings("0-1"), siblings("")), (1, 2, 2, 0));
    }
}
