//! Cost of the page book-keeping of a step: allocate and release, append, fork, and a steady batch.
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use headrace_kv::{Buckets, KvCache, KvGeometry, KvLayout, PageAllocator, VecStore};
use headrace_numerics::elementwise::KvDtype;

const PAGES: usize = 100_000;

/// Pages so small that the store's own work does not show.
const TINY: KvGeometry = KvGeometry {
    layers: 1,
    kv_heads: 1,
    head_dim: 1,
    dtype: KvDtype::F16,
    layout: KvLayout::HeadMajor,
    page_tokens: KvGeometry::DEFAULT_PAGE_TOKENS,
};

fn cache() -> KvCache {
    let mut cache = KvCache::new(TINY, Buckets::new(1, PAGES, TINY.page_bytes() as u64, 1).unwrap()).unwrap();
    cache.grow(&mut VecStore::new(TINY), PAGES).unwrap();
    cache
}

fn allocator(c: &mut Criterion) {
    let mut a = PageAllocator::new();
    a.set_capacity(PAGES).unwrap();
    for _ in 0..PAGES / 2 {
        a.allocate().unwrap();
    }
    c.bench_function("allocate and release a page, half of 100,000 in use", |b| {
        b.iter(|| {
            let page = a.allocate().unwrap();
            a.release(black_box(page)).unwrap()
        });
    });
}

fn sequences(c: &mut Criterion) {
    let max = TINY.page_tokens * PAGES / 64;
    let mut kv = cache();
    let id = kv.create(max).unwrap();
    c.bench_function("append 1 token (mean over page boundaries)", |b| {
        b.iter(|| {
            if kv.length(id).unwrap() == max {
                kv.rewind(id, 0).unwrap();
            }
            kv.append(id, 1).unwrap()
        });
    });

    let mut kv = cache();
    let ids: Vec<_> = (0..32).map(|_| kv.create(max).unwrap()).collect();
    let rows: Vec<_> = ids.iter().map(|&id| (id, 1)).collect();
    c.bench_function("a decode step of 32 sequences: pages_needed, growth_for, 32 appends", |b| {
        b.iter(|| {
            if kv.length(ids[0]).unwrap() == max {
                ids.iter().for_each(|&id| kv.rewind(id, 0).unwrap());
            }
            let needed = kv.pages_needed(&rows).unwrap();
            assert!(kv.growth_for(needed).unwrap().is_none());
            for &id in &ids {
                black_box(kv.append(id, 1).unwrap());
            }
        });
    });

    let mut kv = cache();
    let id = kv.create(8192).unwrap();
    kv.append(id, 8000).unwrap();
    c.bench_function("fork 8,000 tokens (250 pages) and free the fork", |b| {
        b.iter(|| {
            let fork = kv.fork(id, 8192).unwrap();
            kv.free(black_box(fork)).unwrap();
        });
    });

    let mut kv = cache();
    let id = kv.create(8192).unwrap();
    c.bench_function("prefill 8,000 tokens in one append, rewind to 0", |b| {
        b.iter(|| {
            kv.append(id, 8000).unwrap();
            kv.rewind(id, 0).unwrap();
        });
    });
}

fn growth(c: &mut Criterion) {
    c.bench_function("grow 1 to 100,000 pages over all buckets, book-keeping and tiny store", |b| {
        let fresh = || {
            let buckets = Buckets::new(1, PAGES, TINY.page_bytes() as u64, 1).unwrap();
            (KvCache::new(TINY, buckets).unwrap(), VecStore::new(TINY))
        };
        let grow = |(mut kv, mut store): (KvCache, VecStore)| {
            while let Some(bucket) = kv.buckets().next(kv.bucket()) {
                kv.grow(&mut store, bucket.pages).unwrap();
            }
            (kv, store)
        };
        b.iter_batched(fresh, grow, BatchSize::LargeInput);
    });
}

criterion_group!(benches, allocator, sequences, growth);
criterion_main!(benches);
