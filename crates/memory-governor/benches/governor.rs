//! What a reservation costs, alone, with waiting threads about, and with bytes to be taken back.
//!
//! `cargo bench -p headrace-memory-governor`
#![allow(clippy::unwrap_used)] // nothing here can fail unless the bench itself is wrong

use std::hint::black_box;
use std::sync::{Arc, Mutex};

use criterion::{Criterion, criterion_group, criterion_main};
use headrace_memory_governor::{Ask, Governor, Holder, HolderSpec, Lease, Pool, PoolSpec, Reclaim, ReclaimError, Role};

const DEVICE: Pool = Pool::Device(0);
const GRANULE: u64 = 2 << 20;

struct Weights {
    lease: Mutex<Lease>,
}

impl Reclaim for Weights {
    fn offer(&self, ask: &Ask) -> Vec<Lease> {
        let mut lease = self.lease.lock().unwrap();
        let bytes = ask.bytes.min(lease.bytes());
        lease.split(bytes).into_iter().collect()
    }

    fn evict(&self, _: &[Lease]) -> Result<(), ReclaimError> {
        Ok(())
    }

    fn restore(&self, leases: Vec<Lease>, _: bool) {
        leases.into_iter().for_each(|l| self.lease.lock().unwrap().merge(l).unwrap());
    }
}

fn governor(limit: u64) -> Governor {
    Governor::new([PoolSpec { pool: DEVICE, limit, granule: GRANULE }]).unwrap()
}

/// As many other holders as an engine has.
fn crowd(governor: &Governor) -> Vec<Holder> {
    let names = ["staging", "workspace", "graphs", "context"];
    names.map(|name| governor.holder(DEVICE, HolderSpec::new(name, Role::Other, 9)).unwrap()).into()
}

fn bench(c: &mut Criterion) {
    let free = governor(64 << 30);
    let _crowd = crowd(&free);
    let holder = free.holder(DEVICE, HolderSpec::new("kv", Role::Kv, 5)).unwrap();
    c.bench_function("reserve, commit, release", |b| {
        b.iter(|| black_box(holder.reserve(black_box(3 * GRANULE)).unwrap().commit()).release())
    });
    c.bench_function("reserve, abort", |b| b.iter(|| holder.reserve(black_box(3 * GRANULE)).unwrap().abort()));
    c.bench_function("report", |b| b.iter(|| free.report()));

    let tight = governor(8 << 30);
    let _crowd = crowd(&tight);
    let kv = tight.holder(DEVICE, HolderSpec::new("kv", Role::Kv, 5).floor(GRANULE).promise(4 << 30)).unwrap();
    let account = tight.holder(DEVICE, HolderSpec::new("weights", Role::Weights, 1)).unwrap();
    let weights = Arc::new(Weights { lease: Mutex::new(account.empty_lease()) });
    account.set_reclaim(&weights);
    c.bench_function("grow by reclaim, give back, lend again", |b| {
        b.iter(|| {
            let free = account.room().free;
            let lent = account.try_reserve(free).unwrap().commit();
            weights.lease.lock().unwrap().merge(lent).unwrap();
            kv.reserve(black_box(64 << 20)).unwrap().commit().release();
        })
    });
    c.bench_function("refused", |b| b.iter(|| kv.reserve(black_box(16 << 30)).unwrap_err()));
}

criterion_group!(benches, bench);
criterion_main!(benches);
