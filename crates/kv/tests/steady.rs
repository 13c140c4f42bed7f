//! A steady step allocates nothing on the heap.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use allocation_counter::measure;
use common::Rig;
use headrace_kv::{KvLayout, SequenceId};

#[test]
fn appends_over_page_boundaries_and_rewinds_allocate_nothing() {
    let mut rig = Rig::new(KvLayout::HeadMajor, 5000, 4096);
    for _ in 0..8 {
        rig.create(5000).unwrap();
    }
    rig.cache.grow(&mut rig.store, 5000).unwrap();
    let rows: Vec<(SequenceId, usize)> = rig.model.iter().map(|(id, _)| (*id, 1)).collect();
    let steps = measure(|| {
        for step in 0..5000 {
            let needed = rig.cache.pages_needed(&rows).unwrap();
            assert_eq!(needed, if step % 32 == 0 { 8 } else { 0 });
            assert_eq!(rig.cache.growth_for(needed), Ok(None));
            for &(id, tokens) in &rows {
                rig.cache.append(id, tokens).unwrap();
            }
            rig.cache.copy_pages(&mut rig.store).unwrap();
        }
        for &(id, _) in &rows {
            rig.cache.rewind(id, 7).unwrap();
            rig.cache.append(id, 4000).unwrap();
        }
    });
    assert_eq!(steps.count_total, 0);
    // The instrument sees what there is to see.
    assert!(measure(|| assert!(rig.cache.create(32).is_ok())).count_total > 0);
}

/// Once the queue of copies has had its size, copy on write allocates nothing either.
#[test]
fn a_second_copy_on_write_allocates_nothing() {
    let mut rig = Rig::new(KvLayout::HeadMajor, 50, 4096);
    let a = rig.create(100).unwrap();
    rig.append(a, 40);
    let forks: Vec<_> = (0..2).map(|_| rig.fork(a, 100).unwrap()).collect();
    rig.append(forks[0], 1);
    let id = rig.model[forks[1]].0;
    rig.make_room(&[(id, 1)]);
    let copy = measure(|| {
        rig.cache.append(id, 1).unwrap();
        assert_eq!(rig.cache.pending_copies().len(), 1);
        rig.cache.copy_pages(&mut rig.store).unwrap();
    });
    assert_eq!(copy.count_total, 0);
}
