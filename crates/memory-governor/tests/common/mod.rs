//! A holder that yields, as tests want it: with a cap, a failure at a chosen step, and a record of what it was asked.
#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking
#![allow(dead_code)] // not every test binary uses all of it

use std::sync::{Arc, Mutex};

use headrace_memory_governor::{
    Ask, Governor, Holder, HolderSpec, Lease, Pool, PoolReport, PoolSpec, Reclaim, ReclaimError, Role,
};

pub const DEVICE: Pool = Pool::Device(0);
pub const MIB: u64 = 1 << 20;

pub fn governor(limit: u64, granule: u64) -> Governor {
    Governor::new([PoolSpec { pool: DEVICE, limit, granule }]).unwrap()
}

pub fn pool(governor: &Governor) -> PoolReport {
    governor.report().pool(DEVICE).unwrap().clone()
}

/// The three figures that must be zero at every moment.
pub fn assert_sound(governor: &Governor) {
    let pool = pool(governor);
    assert_eq!((pool.peak_oversubscribed, pool.underflows), (0, 0), "{pool}");
    assert!(pool.used <= pool.limit, "{pool}");
}

/// Runs at the start of a callback, with the callback's name.
pub type Hook = Arc<dyn Fn(&str) + Send + Sync>;

#[derive(Default)]
pub struct Mood {
    /// Offers at most this much, in total per ask.
    pub cap: Option<u64>,
    /// Fails to evict.
    pub stuck: bool,
    /// Runs at the start of every callback.
    pub hook: Option<Hook>,
}

/// Bytes that can be asked for, such as resident weights.
pub struct Yielder {
    pub holder: Holder,
    pub leases: Mutex<Vec<Lease>>,
    pub mood: Mutex<Mood>,
    pub asks: Mutex<Vec<Ask>>,
    /// (leases restored, whether they had been evicted)
    pub restored: Mutex<Vec<(usize, bool)>>,
    /// Bytes whose memory was freed and not filled again.
    pub evicted: Mutex<u64>,
}

impl Yielder {
    pub fn new(governor: &Governor, name: &str, priority: u32) -> Arc<Self> {
        Self::with(governor, HolderSpec::new(name, Role::Weights, priority))
    }

    pub fn with(governor: &Governor, spec: HolderSpec) -> Arc<Self> {
        let yielder = Arc::new(Self {
            holder: governor.holder(DEVICE, spec).unwrap(),
            leases: Mutex::default(),
            mood: Mutex::default(),
            asks: Mutex::default(),
            restored: Mutex::default(),
            evicted: Mutex::default(),
        });
        yielder.holder.set_reclaim(&yielder);
        yielder
    }

    pub fn fill(&self, bytes: u64) {
        self.leases.lock().unwrap().push(self.holder.try_reserve(bytes).unwrap().commit());
    }

    pub fn bytes(&self) -> u64 {
        self.leases.lock().unwrap().iter().map(Lease::bytes).sum()
    }

    fn hook(&self, step: &str) {
        let hook = self.mood.lock().unwrap().hook.clone();
        if let Some(hook) = hook {
            hook(step);
        }
    }
}

impl Reclaim for Yielder {
    fn offer(&self, ask: &Ask) -> Vec<Lease> {
        self.hook("offer");
        self.asks.lock().unwrap().push(ask.clone());
        let mut left = ask.bytes.min(self.mood.lock().unwrap().cap.unwrap_or(u64::MAX));
        let mut offer = Vec::new();
        for lease in self.leases.lock().unwrap().iter_mut().rev() {
            let part = left.min(lease.bytes());
            if part > 0 {
                offer.push(lease.split(part).unwrap());
                left -= part;
            }
        }
        self.leases.lock().unwrap().retain(|l| l.bytes() > 0);
        offer
    }

    fn evict(&self, leases: &[Lease]) -> Result<(), ReclaimError> {
        self.hook("evict");
        if self.mood.lock().unwrap().stuck {
            return Err(ReclaimError { what: "the stream hangs".into() });
        }
        *self.evicted.lock().unwrap() += leases.iter().map(Lease::bytes).sum::<u64>();
        Ok(())
    }

    fn restore(&self, leases: Vec<Lease>, evicted: bool) {
        self.hook("restore");
        if evicted {
            *self.evicted.lock().unwrap() -= leases.iter().map(Lease::bytes).sum::<u64>();
        }
        self.restored.lock().unwrap().push((leases.len(), evicted));
        self.leases.lock().unwrap().extend(leases);
    }
}
