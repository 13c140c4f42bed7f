//! Growth over every bucket boundary with ragged sequences, in both layouts; failing stores; admission to the last page.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{Rig, geometry};
use headrace_kv::{Buckets, KvCache, KvError, KvGeometry, KvLayout, KvPageStore, PageCopy, StoreError, VecStore};

const LAYOUTS: [KvLayout; 2] = [KvLayout::HeadMajor, KvLayout::SeqMajor];

/// Ragged sequences fill each bucket up to one token before its last, its last, and one beyond.
#[test]
fn ragged_sequences_cross_every_boundary() {
    for layout in LAYOUTS {
        let mut rig = Rig::new(layout, 60, 3000);
        let buckets = rig.cache.buckets().clone();
        assert!(buckets.all().len() > 5);
        for &bucket in &buckets.all()[..buckets.all().len() - 1] {
            // One token, a page less one, a page, a page and one: as many of them as fit; the rest in one sequence.
            let mut left = bucket.pages;
            for tokens in [1usize, 31, 32, 33] {
                let pages = tokens.div_ceil(32);
                if left > pages {
                    let at = rig.create(tokens).unwrap();
                    rig.append(at, tokens);
                    left -= pages;
                }
            }
            let last = rig.create(left * 32 + 1).unwrap();
            rig.append(last, left * 32 - 1);
            assert_eq!((rig.cache.bucket(), rig.cache.stats().free_pages), (bucket, 0));
            rig.append(last, 1);
            assert_eq!(rig.cache.bucket(), bucket, "the last token of a bucket needs no growth");
            rig.check();

            let id = rig.model[last].0;
            let refused = rig.cache.append(id, 1);
            assert_eq!(refused, Err(KvError::OutOfPages { needed: 1, free: 0, capacity: bucket.pages }));
            let addresses: Vec<_> = (0..bucket.pages as u32).map(|p| rig.store.address(p)).collect();
            let tables: Vec<_> = rig.model.iter().map(|(id, _)| rig.cache.page_table(*id).unwrap().to_vec()).collect();
            let events = rig.cache.stats().growth_events;
            let next = buckets.next(bucket).unwrap();
            assert_eq!(rig.cache.growth_for(1), Ok(Some(next)));
            assert_eq!(rig.cache.grow(&mut rig.store, bucket.pages + 1), Ok(next));
            assert_eq!(rig.cache.stats().growth_events, events + 1);
            rig.check();
            assert_eq!(addresses, (0..bucket.pages as u32).map(|p| rig.store.address(p)).collect::<Vec<_>>());
            for ((id, _), table) in rig.model.iter().zip(&tables) {
                assert_eq!(rig.cache.page_table(*id).unwrap(), table);
            }
            rig.append(last, 1);
            rig.check();
            while let Some((id, _)) = rig.model.pop() {
                rig.cache.free(id).unwrap();
            }
        }
        assert_eq!(rig.cache.stats().growth_events as usize, buckets.all().len() - 1);
    }
}

#[test]
fn admission_is_exact_to_the_last_page() {
    let mut rig = Rig::new(KvLayout::HeadMajor, 10, 1);
    let a = rig.create(5 * 32).unwrap();
    assert!(rig.cache.admits(5 * 32) && !rig.cache.admits(5 * 32 + 1));
    let refused = KvError::NotAdmissible { max_length: 161, pages: 6, promised: 5, limit: 10 };
    assert_eq!(rig.create(161), Err(refused));
    assert_eq!(rig.cache.stats().used_pages, 0, "a promise withholds no page");
    let b = rig.create(160).unwrap();
    rig.append(a, 160);
    rig.append(b, 160);
    assert_eq!(rig.cache.stats().free_pages, 0);
    // A sequence that asks for more is refused until the other has ended.
    assert!(rig.cache.set_max_length(rig.model[a].0, 161).is_err());
    let (id, _) = rig.model.remove(b);
    rig.cache.free(id).unwrap();
    rig.cache.set_max_length(rig.model[a].0, 320).unwrap();
    rig.append(a, 160);
    rig.check();
}

#[test]
fn the_last_writer_of_a_shared_page_keeps_it() {
    let mut rig = Rig::new(KvLayout::SeqMajor, 20, 1);
    let a = rig.create(100).unwrap();
    rig.append(a, 40);
    let (b, c) = (rig.fork(a, 100).unwrap(), rig.fork(a, 100).unwrap());
    let ids: Vec<_> = [a, b, c].iter().map(|&at| rig.model[at].0).collect();
    let shared = rig.cache.page_table(ids[0]).unwrap()[1];
    assert_eq!(rig.cache.allocator().references(shared), 3);
    // Two copies for three writers.
    assert_eq!(rig.cache.pages_needed(&[(ids[0], 1), (ids[1], 1), (ids[2], 1)]), Ok(2));
    for at in [a, b, c] {
        rig.append(at, 1);
        rig.check();
    }
    assert_eq!(rig.cache.page_table(ids[2]).unwrap()[1], shared);
    assert_eq!(rig.cache.stats().copied_pages, 2);
    // At a page boundary there is nothing to copy.
    rig.cache.rewind(ids[0], 32).unwrap();
    rig.model[a].1.truncate(32);
    let d = rig.fork(a, 64).unwrap();
    rig.append(d, 1);
    rig.append(a, 1);
    assert_eq!(rig.cache.stats().copied_pages, 2);
    rig.check();
}

/// Fails when told to; else a [`VecStore`] that claims to have moved what it is told.
struct Moody {
    inner: VecStore,
    fail: bool,
    moved: u64,
}

impl Moody {
    fn mood(&self) -> Result<(), StoreError> {
        match self.fail {
            true => Err(StoreError::Failed { what: "told to".into() }),
            false => Ok(()),
        }
    }
}

impl KvPageStore for Moody {
    fn geometry(&self) -> KvGeometry {
        self.inner.geometry()
    }
    fn capacity_pages(&self) -> usize {
        self.inner.capacity_pages()
    }
    fn grow_to(&mut self, pages: usize) -> Result<u64, StoreError> {
        self.mood().and_then(|()| self.inner.grow_to(pages)).map(|moved| moved + self.moved)
    }
    fn shrink_to(&mut self, pages: usize) -> Result<(), StoreError> {
        self.mood().and_then(|()| self.inner.shrink_to(pages))
    }
    fn copy_page(&mut self, copy: PageCopy) -> Result<(), StoreError> {
        self.mood().and_then(|()| self.inner.copy_page(copy))
    }
    fn read(&self, page: u32, offset: usize, into: &mut [u8]) -> Result<(), StoreError> {
        self.inner.read(page, offset, into)
    }
    fn write(&mut self, page: u32, offset: usize, bytes: &[u8]) -> Result<(), StoreError> {
        self.inner.write(page, offset, bytes)
    }
}

#[test]
fn a_store_that_fails_leaves_the_cache_as_it_was() {
    let g = geometry(KvLayout::HeadMajor);
    let buckets = Buckets::new(2, 50, g.page_bytes() as u64, 1).unwrap();
    let mut store = Moody { inner: VecStore::new(g), fail: false, moved: 0 };
    let mut cache = KvCache::new(g, buckets).unwrap();
    cache.grow(&mut store, 10).unwrap();
    let a = cache.create(200).unwrap();
    cache.append(a, 40).unwrap();
    let b = cache.fork(a, 200).unwrap();
    cache.append(b, 1).unwrap();

    let before = cache.clone();
    store.fail = true;
    assert!(matches!(cache.grow(&mut store, 40), Err(KvError::Store(_))));
    assert!(matches!(cache.copy_pages(&mut store), Err(KvError::Store(_))));
    assert_eq!(cache, before);
    store.fail = false;
    assert_eq!(cache.copy_pages(&mut store), Ok(1));

    let before = cache.clone();
    store.fail = true;
    assert!(matches!(cache.shrink(&mut store, 3), Err(KvError::Store(_))));
    assert_eq!(cache, before);
    store.fail = false;
    assert_eq!(cache.shrink(&mut store, 3).unwrap().pages, 3);

    // A store that moves bytes is reported, not believed away.
    store.moved = 77;
    cache.grow(&mut store, 20).unwrap();
    assert_eq!(cache.stats().growth_moved_bytes, 77);
}

#[test]
fn what_does_not_belong_together_is_refused() {
    let (head, seq) = (geometry(KvLayout::HeadMajor), geometry(KvLayout::SeqMajor));
    let buckets = |max, bytes| Buckets::new(1, max, bytes, 1).unwrap();
    let bytes = head.page_bytes() as u64;
    assert!(matches!(KvCache::new(head, buckets(9, bytes + 1)), Err(KvError::Buckets { .. })));
    assert!(matches!(
        KvCache::new(KvGeometry { page_tokens: 33, ..head }, buckets(9, bytes)),
        Err(KvError::Geometry { .. })
    ));
    let mut cache = KvCache::new(head, buckets(9, bytes)).unwrap();
    assert_eq!(cache.grow(&mut VecStore::new(seq), 1), Err(KvError::GeometryMismatch));

    // A lower limit must still hold what is promised.
    cache.create(6 * 32).unwrap();
    let low = KvError::LimitTooLow { limit: 5, promised: 6, capacity: 0 };
    assert_eq!(cache.set_buckets(buckets(5, bytes)), Err(low));
    cache.set_buckets(buckets(6, bytes)).unwrap();
    assert!(!cache.admits(1));
    cache.set_buckets(buckets(7, bytes)).unwrap();
    assert!(cache.admits(32) && !cache.admits(33));
}
