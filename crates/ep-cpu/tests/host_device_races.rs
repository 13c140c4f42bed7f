//! A schedule with one wait, one release or one piece wrong: refused when it is recorded, and wrong logits on a device
//! that was told to run it all the same.
#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking

mod host_rig;

use headrace_ep_cpu::host_device::{HostDevice, HostOptions};
use headrace_provider::{DeviceError, Instr, Op, Place, Provider, RangeKind, Segment, StepProgram};
use headrace_testing::ModelShape;
use host_rig::{GRANULE, MAX_ROWS, Rig, options, tokens};

const SLOTS: u32 = 2;

fn shape() -> ModelShape {
    ModelShape { layers: 3, ..ModelShape::default() }
}

/// Everything is streamed but the first layer's head, so that a step computes for a while before it reads a slot.
fn rig(device: HostDevice, shape: &ModelShape) -> Rig {
    let mut rig = Rig::new(device, shape, 2, 7);
    let resident = (0..rig.pieces.len()).map(|i| i < rig.pieces.len() / 2).collect();
    rig.place(resident).unwrap();
    rig
}

fn position(program: &StepProgram, nth: usize, wanted: impl Fn(&Instr) -> bool) -> usize {
    let found = program.instrs.iter().enumerate().filter(|(_, i)| wanted(i)).nth(nth);
    found.expect("the program has such an instruction").0
}

fn without(program: &StepProgram, nth: usize, wanted: impl Fn(&Instr) -> bool) -> StepProgram {
    let mut broken = program.clone();
    broken.instrs.remove(position(program, nth, wanted));
    broken
}

/// A slow link: a reader that doesn't wait for it comes first.
fn slow() -> HostOptions {
    HostOptions { link: Some(1 << 20), ..options(2) }
}

/// The logits of one step of many rows through an unchecked device: with the schedule as it should be, and broken.
fn both(options: HostOptions, shape: &ModelShape, broken: impl Fn(&StepProgram) -> StepProgram) {
    let tokens = tokens(3, MAX_ROWS, shape.vocab);
    // SAFETY: all ranges that the programs read stay mapped; the race in the broken one is what this test is about. It is
    // between bytes that any value may have, and the logits are compared only.
    let device = unsafe { HostDevice::new_unchecked(options) }.unwrap();
    let mut rig = rig(device, shape);
    let want = rig.expected(&tokens).concat();
    let step = rig.begin(SLOTS).unwrap();
    for _ in 0..3 {
        assert!(rig.step(step, 0, &tokens).unwrap() == want, "the schedule as it should be");
    }
    let (prologue, good) = rig.schedule(SLOTS);
    let step = rig.begin_with(prologue, broken(&good)).unwrap();
    // A race is lost sooner or later, on a machine that does other things as well.
    let lost = (0..20).any(|_| rig.step(step, 0, &tokens).unwrap() != want);
    assert!(lost, "nobody would notice the broken schedule");
}

fn refused(broken: impl Fn(&StepProgram) -> StepProgram, why: &str) {
    let mut rig = rig(HostDevice::new(options(1)).unwrap(), &shape());
    let (prologue, good) = rig.schedule(SLOTS);
    match rig.begin_with(prologue, broken(&good)) {
        Err(DeviceError::Invalid { what, .. }) => assert!(what.contains(why), "{what}"),
        other => panic!("{other:?} instead of {why}"),
    }
    // The device works.
    let tokens = tokens(4, 3, shape().vocab);
    let step = rig.begin(SLOTS).unwrap();
    assert_eq!(rig.step(step, 0, &tokens).unwrap(), rig.expected(&tokens).concat());
}

fn is_wait(i: &Instr) -> bool {
    matches!(i, Instr::WaitCopy { .. })
}

fn is_free(i: &Instr) -> bool {
    matches!(i, Instr::Free { .. })
}

fn is_copy(i: &Instr) -> bool {
    matches!(i, Instr::Copy { .. })
}

#[test]
fn without_a_wait() {
    // The third one: what it waits for is copied in this step.
    both(slow(), &shape(), |p| without(p, 2, is_wait));
    refused(|p| without(p, 2, is_wait), "without a wait");
}

#[test]
fn without_a_release() {
    // The first one. Nothing holds back the copy behind it, and many rows keep the layers before it busy for a while.
    let shape = ModelShape { hidden: 256, ffn: 512, ..shape() };
    both(options(2), &shape, |p| without(p, 0, is_free));
    refused(|p| without(p, 0, is_free), "not released");
}

#[test]
fn without_a_copy() {
    both(options(2), &shape(), |p| without(p, 1, is_copy));
    refused(|p| without(p, 1, is_copy), "after it was released");
    // Nor is it enough that the next one waits for something else.
    refused(|p| without(&without(p, 1, is_copy), 1, is_free), "doesn't hold");
}

#[test]
fn slots_and_segments_that_are_wrong() {
    let change = |program: &StepProgram, nth, wanted: fn(&Instr) -> bool, to: &dyn Fn(&mut Instr)| {
        let at = position(program, nth, wanted);
        let mut broken = program.clone();
        to(&mut broken.instrs[at]);
        broken
    };
    let reads_slot = |i: &Instr| match i {
        Instr::Op(Op::Linear { segments, .. }) => matches!(segments[0].place, Place::Slot { .. }),
        _ => false,
    };
    let moved = |p: &StepProgram, to: fn(Place) -> Place| {
        change(p, 0, reads_slot, &|i| {
            if let Instr::Op(Op::Linear { segments, .. }) = i {
                segments[0].place = to(segments[0].place);
            }
        })
    };
    refused(|p| moved(p, |_| Place::File), "not a place");
    refused(|p| moved(p, |_| Place::Resident { offset: 1 << 40 }), "not mapped");
    refused(|p| moved(p, |_| Place::Resident { offset: 128 }), "multiple");
    refused(|p| moved(p, |_| Place::Slot { slot: 9, offset: 0 }), "slot 9");
    refused(|p| moved(p, |_| Place::Slot { slot: 0, offset: 1 << 40 }), "of slot 0");
    refused(|p| moved(p, |_| Place::Slot { slot: 0, offset: 256 }), "doesn't hold");
    refused(|p| change(p, 0, is_copy, &|i| *i = Instr::Copy { segments: vec![], slot: 0 }), "side by side");
    refused(
        |p| {
            change(p, 0, is_copy, &|i| {
                if let Instr::Copy { segments, .. } = i {
                    let twice: Vec<Segment> = segments.iter().chain(segments.iter()).copied().collect();
                    *segments = twice;
                }
            })
        },
        "side by side",
    );
    // A release before the last reader, and a wait for what nobody copies.
    refused(
        |p| {
            let (op, free) = (position(p, 0, reads_slot), position(p, 0, is_free));
            let mut broken = p.clone();
            let free = broken.instrs.remove(free);
            broken.instrs.insert(op, free);
            broken
        },
        "after it was released",
    );
}

#[test]
fn a_step_whose_ring_was_not_filled_or_whose_granules_went_away_is_refused() {
    let mut rig = rig(HostDevice::new(options(2)).unwrap(), &shape());
    let tokens = tokens(5, 4, shape().vocab);
    let want = rig.expected(&tokens).concat();
    let (prologue, step) = rig.schedule(SLOTS);
    rig.device.resize(RangeKind::Staging, u64::from(step.slots) * step.slot_bytes).unwrap();
    let id = rig.device.record(step.clone()).unwrap();
    let refused = |result: Result<Vec<u32>, DeviceError>, why: &str| match result {
        Err(DeviceError::Invalid { what, .. }) => assert!(what.contains(why), "{what}"),
        other => panic!("{other:?} instead of {why}"),
    };
    refused(rig.step(id, 0, &tokens), "fill the ring first");
    for (slots, slot_bytes) in [(3, step.slot_bytes * 8), (u32::MAX, u64::MAX)] {
        let large = StepProgram { slots, slot_bytes, ..step.clone() };
        refused(rig.device.record(large).map(|_| vec![]), "staging range are mapped");
    }
    let filled = rig.begin_with(prologue, step.clone()).unwrap();
    assert!(rig.step(filled, 0, &tokens).unwrap() == want);
    assert!(rig.step(id, 0, &tokens).unwrap() == want, "the other recording of the same program");
    // A granule goes, and comes back empty: refused, then wrong but for the poison, which is never a number.
    rig.device.unmap(RangeKind::Weights, 0, GRANULE).unwrap();
    refused(rig.step(filled, 0, &tokens), "not mapped");
    refused(rig.begin(SLOTS).map(|_| vec![]), "not mapped");
    rig.device.map(RangeKind::Weights, 0, GRANULE).unwrap();
    rig.step(filled, 0, &tokens).unwrap();
    assert!(rig.output.tokens.iter().all(Result::is_err), "poisoned weights gave finite logits");
    // The ring goes.
    rig.device.resize(RangeKind::Staging, 0).unwrap();
    refused(rig.step(filled, 0, &tokens), "staging range");
}
