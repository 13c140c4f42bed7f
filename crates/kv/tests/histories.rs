//! Random histories against the naive model: contents, holders, promises; a failed operation changes nothing.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::Rig;
use headrace_kv::{KvError, KvLayout};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    Create {
        max_length: usize,
    },
    /// One step for several sequences; then perhaps one of them is cancelled before the step ran.
    Step {
        appends: Vec<(usize, usize)>,
        make_room: bool,
        cancel: Option<(usize, bool)>,
    },
    Fork {
        at: usize,
        max_length: usize,
    },
    Rewind {
        at: usize,
        length: usize,
    },
    SetMaxLength {
        at: usize,
        max_length: usize,
    },
    Free {
        at: usize,
    },
    Grow {
        pages: usize,
    },
    Shrink {
        pages: usize,
        fit: bool,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let length = 0usize..260;
    let at = 0usize..1000;
    prop_oneof![
        3 => length.clone().prop_map(|max_length| Op::Create { max_length }),
        8 => (
            prop::collection::vec((at.clone(), prop_oneof![Just(1usize), 0usize..100]), 1..5),
            prop::bool::weighted(0.8),
            prop::option::weighted(0.2, (at.clone(), any::<bool>())),
        ).prop_map(|(appends, make_room, cancel)| Op::Step { appends, make_room, cancel }),
        3 => (at.clone(), length.clone()).prop_map(|(at, max_length)| Op::Fork { at, max_length }),
        3 => (at.clone(), length.clone()).prop_map(|(at, length)| Op::Rewind { at, length }),
        1 => (at.clone(), length).prop_map(|(at, max_length)| Op::SetMaxLength { at, max_length }),
        1 => at.prop_map(|at| Op::Free { at }),
        1 => (0usize..40).prop_map(|pages| Op::Grow { pages }),
        2 => (0usize..30, any::<bool>()).prop_map(|(pages, fit)| Op::Shrink { pages, fit }),
    ]
}

/// What was refused has left cache and store capacity as they were.
fn refused<T: std::fmt::Debug>(rig: &Rig, before: &headrace_kv::KvCache, result: Result<T, KvError>) -> KvError {
    assert_eq!(&rig.cache, before, "a refused operation changed the cache");
    result.unwrap_err()
}

fn run(rig: &mut Rig, op: Op) {
    let before = rig.cache.clone();
    let pick = |at: usize, rig: &Rig| (!rig.model.is_empty()).then(|| at % rig.model.len());
    match op {
        Op::Create { max_length } => match rig.cache.admits(max_length) {
            true => drop(rig.create(max_length).unwrap()),
            false => {
                let result = rig.create(max_length);
                assert!(matches!(refused(rig, &before, result), KvError::NotAdmissible { .. }));
            }
        },
        Op::Step { mut appends, make_room, cancel } => {
            if rig.model.is_empty() {
                return;
            }
            appends.iter_mut().for_each(|a| a.0 %= rig.model.len());
            appends.sort_unstable();
            appends.dedup_by_key(|a| a.0);
            step(rig, &appends, make_room, cancel);
        }
        Op::Fork { at, max_length } => {
            let Some(at) = pick(at, rig) else { return };
            if let Err(e) = rig.fork(at, max_length) {
                let long = max_length < rig.model[at].1.len();
                assert!(matches!(e, KvError::LengthExceeded { .. }) == long);
                assert!(long || !rig.cache.admits(max_length));
                refused::<()>(rig, &before, Err(e));
            }
        }
        Op::Rewind { at, length } => {
            let Some(at) = pick(at, rig) else { return };
            let (id, now) = (rig.model[at].0, rig.model[at].1.len());
            let result = rig.cache.rewind(id, length);
            if length <= now {
                result.unwrap();
                rig.model[at].1.truncate(length);
            } else {
                assert_eq!(refused(rig, &before, result), KvError::RewindForward { length: now, asked: length });
            }
        }
        Op::SetMaxLength { at, max_length } => {
            let Some(at) = pick(at, rig) else { return };
            let result = rig.cache.set_max_length(rig.model[at].0, max_length);
            match result {
                Ok(()) => assert!(max_length >= rig.model[at].1.len()),
                Err(_) => drop(refused(rig, &before, result)),
            }
        }
        Op::Free { at } => {
            let Some(at) = pick(at, rig) else { return };
            let (id, _) = rig.model.swap_remove(at);
            rig.cache.free(id).unwrap();
            let freed = rig.cache.clone();
            let result = rig.cache.free(id);
            assert_eq!(refused(rig, &freed, result), KvError::UnknownSequence);
        }
        Op::Grow { pages } => {
            let result = rig.cache.grow(&mut rig.store, pages);
            match rig.cache.buckets().bucket_for(pages) {
                Some(_) => assert!(result.unwrap().pages >= pages),
                None => assert!(matches!(refused(rig, &before, result), KvError::OutOfPages { .. })),
            }
        }
        Op::Shrink { pages, fit } => {
            let target = if fit { rig.cache.shrink_for(pages).pages } else { pages };
            let result = rig.cache.shrink(&mut rig.store, target);
            match result {
                Ok(bucket) => {
                    let was = before.bucket().pages;
                    assert!(bucket.pages >= target.min(was) && bucket.pages <= was);
                }
                Err(_) => {
                    assert!(!fit, "what shrink_for names can be done");
                    assert!(matches!(refused(rig, &before, result), KvError::PagesInUse { .. }));
                }
            }
        }
    }
}

fn step(rig: &mut Rig, appends: &[(usize, usize)], make_room: bool, cancel: Option<(usize, bool)>) {
    // Sequences too near to their maximum are refused one by one.
    let (appends, too_long): (Vec<_>, Vec<_>) = appends.iter().copied().partition(|&(at, n)| {
        let (id, tokens) = &rig.model[at];
        tokens.len() + n <= rig.cache.max_length(*id).unwrap()
    });
    for (at, n) in too_long {
        let (before, id) = (rig.cache.clone(), rig.model[at].0);
        assert!(matches!(rig.cache.pages_needed(&[(id, n)]), Err(KvError::LengthExceeded { .. })));
        let result = rig.cache.append(id, n);
        assert!(matches!(refused(rig, &before, result), KvError::LengthExceeded { .. }));
    }
    let named: Vec<_> = appends.iter().map(|&(at, n)| (rig.model[at].0, n)).collect();
    let needed = rig.cache.pages_needed(&named).unwrap();
    if make_room {
        rig.make_room(&named);
    }
    let (mut taken, mut done) = (0, Vec::new());
    for (&(at, n), &(id, _)) in appends.iter().zip(&named) {
        let before = rig.cache.clone();
        let alone = rig.cache.pages_needed(&[(id, n)]).unwrap();
        match rig.cache.append(id, n) {
            Ok(appended) => {
                assert_eq!(appended.new_pages, alone);
                taken += appended.new_pages;
                done.push((at, appended.positions.start));
                rig.extend(at, n);
            }
            Err(e) => {
                assert!(!make_room, "room for the whole step was made");
                let (free, capacity) = (before.allocator().free(), before.bucket().pages);
                assert!(alone > free);
                let e = refused::<()>(rig, &before, Err(e));
                assert_eq!(e, KvError::OutOfPages { needed: alone, free, capacity });
            }
        }
    }
    if done.len() == named.len() {
        assert_eq!(taken, needed, "pages_needed is exact");
    }
    if let Some((which, free)) = cancel.filter(|_| !done.is_empty()) {
        // The request goes away between append and step; copies already queued are done all the same.
        let (at, from) = done.remove(which % done.len());
        let id = rig.model[at].0;
        if !rig.cache.pending_copies().is_empty() {
            let before = rig.cache.clone();
            if before.bucket().pages > before.buckets().floor().pages {
                let result = rig.cache.shrink(&mut rig.store, 1);
                assert!(matches!(refused(rig, &before, result), KvError::CopiesPending { .. }));
            }
        }
        if free {
            rig.cache.free(id).unwrap();
            rig.model[at].1.clear();
        } else {
            rig.cache.rewind(id, from).unwrap();
            rig.model[at].1.truncate(from);
        }
        rig.cache.copy_pages(&mut rig.store).unwrap();
        done.iter().for_each(|&(at, from)| rig.write(at, from));
        if free {
            rig.model.remove(at);
        }
    } else {
        rig.cache.copy_pages(&mut rig.store).unwrap();
        done.iter().for_each(|&(at, from)| rig.write(at, from));
    }
}

/// Every sequence admitted gets to its maximum, whatever came before: one token at a time, in turn.
fn complete(rig: &mut Rig) {
    for stride in [17, 1] {
        loop {
            let mut moved = false;
            for at in 0..rig.model.len() {
                let left = rig.cache.max_length(rig.model[at].0).unwrap() - rig.model[at].1.len();
                if left >= stride {
                    rig.append(at, stride);
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
    }
    rig.check();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn histories_match_the_model(
        ops in prop::collection::vec(op(), 1..60),
        layout in prop::sample::select(vec![KvLayout::HeadMajor, KvLayout::SeqMajor]),
        granule in prop::sample::select(vec![1u64, 1000, 4096]),
    ) {
        let mut rig = Rig::new(layout, 30, granule);
        for op in ops {
            run(&mut rig, op);
            rig.check();
        }
        complete(&mut rig);
        while let Some((id, _)) = rig.model.pop() {
            rig.cache.free(id).unwrap();
        }
        rig.check();
        let floor = rig.cache.buckets().floor();
        prop_assert_eq!(rig.cache.shrink(&mut rig.store, 0), Ok(floor));
    }
}
