//! Plans of whole programs: what is launched, what waits for what, and what is refused.

use headrace_model::ModelSpec;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::format::Format;
use headrace_provider::{Instr, Op, StepProgram};
use headrace_testing::{ModelShape, file_program, random_model};

use super::*;

/// A program with every weight resident, one slab after the other.
fn resident(model: &ModelSpec, cuts: usize) -> StepProgram {
    let mut program = file_program(model, 8, 4, ActivationWidth::Int16, cuts);
    let mut next = 0;
    for instr in &mut program.instrs {
        if let Instr::Op(Op::Linear { segments, .. }) = instr {
            for segment in segments {
                let (_, bytes) = slab(&model.tensors[segment.tensor.0], segment.rows).unwrap();
                segment.place = Place::Resident { offset: next };
                next += bytes.next_multiple_of(PLANE_ALIGN as u64);
            }
        }
    }
    program
}

const SLOT: u64 = 1 << 16;

/// The resident program with the linear layers of these numbers read through the ring. A slot is refilled as soon as it has
/// been read: with the piece that comes `slots` later, or at the end with the first ones of the next step.
fn streamed(model: &ModelSpec, layers: &[usize], slots: u32) -> StepProgram {
    let mut program = resident(model, 1);
    (program.slots, program.slot_bytes) = (slots, SLOT);
    let slot = |k: usize| k as u32 % slots;
    let linears = program.instrs.iter().filter_map(|i| match i {
        Instr::Op(Op::Linear { segments, .. }) => Some(segments[0]),
        _ => None,
    });
    let cold: Vec<Segment> = linears
        .enumerate()
        .filter(|(n, _)| layers.contains(n))
        .enumerate()
        .map(|(k, (_, s))| Segment { place: Place::Slot { slot: slot(k), offset: 512 }, ..s })
        .collect();
    let (mut instrs, mut n, mut k) = (Vec::new(), 0, 0);
    for mut instr in std::mem::take(&mut program.instrs) {
        let mut streams = false;
        if let Instr::Op(Op::Linear { segments, .. }) = &mut instr {
            streams = layers.contains(&n);
            n += 1;
            if streams {
                segments[0] = cold[k];
                instrs.push(Instr::WaitCopy { slot: slot(k) });
            }
        }
        instrs.push(instr);
        if streams {
            let next = if k + (slots as usize) < cold.len() { k + slots as usize } else { k % slots as usize };
            instrs.push(Instr::Free { slot: slot(k) });
            instrs.push(Instr::Copy { segments: vec![cold[next]], slot: slot(k) });
            k += 1;
        }
    }
    program.instrs = instrs;
    program
}

/// Replays events as the device would and checks that nothing is read before it is there or overwritten while it is read.
/// Each lane runs as far as it can; `first` says which is favoured.
fn simulate(plan: &CapturePlan, slots: u32, first: Lane) {
    let of = |lane: Lane| -> Vec<&Action> {
        let on = |a: &&Action| match a {
            Action::Launch(_) => lane == Lane::Compute,
            Action::CopyIn(..) => lane == Lane::Copy,
            Action::Signal(l, _) | Action::Await(l, _) => *l == lane,
        };
        plan.actions.iter().filter(on).collect()
    };
    let (compute, copy) = (of(Lane::Compute), of(Lane::Copy));
    let mut signalled = vec![false; plan.events];
    // What each slot holds: the prologue has filled the ring with the step's first pieces.
    let mut slot: Vec<Option<Segment>> = (0..slots)
        .map(|s| {
            plan.tasks().find_map(|t| match t {
                Task::Linear(l) => l
                    .parts
                    .iter()
                    .map(|p| p.segment)
                    .find(|seg| matches!(seg.place, Place::Slot { slot, .. } if slot == s)),
                _ => None,
            })
        })
        .collect();
    let mut at = [0, 0];
    loop {
        let mut moved = false;
        let order = if first == Lane::Compute { [0, 1] } else { [1, 0] };
        for lane in order {
            let actions = if lane == 0 { &compute } else { &copy };
            while let Some(action) = actions.get(at[lane]) {
                match action {
                    Action::Await(_, n) if !signalled[*n] => break,
                    Action::Await(..) => {}
                    Action::Signal(_, n) => {
                        assert!(!signalled[*n], "an event is signalled twice");
                        signalled[*n] = true;
                    }
                    Action::CopyIn(segment, _) => {
                        let Place::Slot { slot: s, .. } = segment.place else { panic!() };
                        slot[s as usize] = Some(*segment);
                    }
                    Action::Launch(Task::Linear(l)) => {
                        for part in &l.parts {
                            if let Place::Slot { slot: s, .. } = part.segment.place {
                                assert_eq!(slot[s as usize], Some(part.segment), "a stale slot is read");
                            }
                        }
                    }
                    Action::Launch(_) => {}
                }
                at[lane] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    assert_eq!(at, [compute.len(), copy.len()], "the lanes wait for each other for ever");
}

#[test]
fn a_resident_step_has_few_launches_and_no_events() {
    let model = random_model(1, &ModelShape { layers: 2, formats: vec![Format::Q4_1], ..ModelShape::default() });
    let plan = plan(&resident(&model, 1), &model).unwrap();
    assert_eq!((plan.events, plan.chooses, plan.computes, plan.copied_bytes), (0, true, true, 0));
    // q, k, v are one launch; so are gate and up: 4 of 7 matrices a layer.
    let linears: Vec<usize> = plan
        .tasks()
        .filter_map(|t| match t {
            Task::Linear(l) => Some(l.parts.len()),
            _ => None,
        })
        .collect();
    assert_eq!(linears, [3, 1, 2, 1, 3, 1, 2, 1, 1]);
    assert_eq!(plan.tasks().count(), 1 + 2 * (2 + 1 + 1 + 1 + 2 + 1 + 1 + 1) + 3);
    assert_eq!((plan.codes_width, plan.floats_width), (96, 0));
}

#[test]
fn activations_are_made_in_the_kinds_that_are_read() {
    let formats = vec![Format::Q4_1, Format::F16];
    let model = random_model(3, &ModelShape { layers: 4, formats, ..ModelShape::default() });
    let plan = plan(&resident(&model, 2), &model).unwrap();
    let mut made = None;
    let (mut codes, mut floats) = (false, false);
    let mut seen = std::collections::BTreeSet::new();
    for task in plan.tasks() {
        match task {
            Task::Activate(a) => {
                if let Some(before) = made.replace(*a) {
                    assert_eq!((before.codes, before.floats), (codes, floats));
                    seen.insert((codes, floats));
                }
                (codes, floats) = (false, false);
            }
            Task::Linear(l) => {
                let quantised = |p: &Part| model.tensors[p.segment.tensor.0].format.is_quantised();
                let first = quantised(&l.parts[0]);
                assert!(l.parts.iter().all(|p| quantised(p) == first), "formats share a launch");
                codes |= first;
                floats |= !first;
            }
            _ => {}
        }
    }
    assert!(seen.len() == 3, "the model has every combination: {seen:?}");
}

#[test]
fn streamed_pieces_are_there_when_read_whichever_stream_is_ahead() {
    let model = random_model(2, &ModelShape::default());
    for (layers, slots) in [(vec![3], 1), (vec![0, 4, 6], 3), (vec![0, 1, 2, 3], 1), (vec![1, 4, 5, 9, 11, 14], 2)] {
        let program = streamed(&model, &layers, slots);
        let plan = plan(&program, &model).unwrap();
        assert_eq!(plan.copies().count(), layers.len());
        let bytes: usize = plan.copies().map(|s| model.tensors[s.tensor.0].bytes()).sum();
        assert_eq!(plan.copied_bytes, bytes as u64);
        simulate(&plan, slots, Lane::Compute);
        simulate(&plan, slots, Lane::Copy);
        // The copy lane joins the capture first and leaves it last.
        assert!(
            matches!(plan.actions[..2], [Action::Signal(Lane::Compute, a), Action::Await(Lane::Copy, b)] if a == b)
        );
        let end = &plan.actions[plan.actions.len() - 2..];
        assert!(matches!(end, [Action::Signal(Lane::Copy, a), Action::Await(Lane::Compute, b)] if a == b));
    }
}

#[test]
fn a_program_of_copies_alone_is_a_plan_without_launches() {
    let model = random_model(2, &ModelShape::default());
    let mut program = streamed(&model, &[0, 1], 2);
    program.instrs.retain(|i| matches!(i, Instr::Copy { .. }));
    let plan = plan(&program, &model).unwrap();
    assert!(!plan.computes && plan.tasks().count() == 0 && plan.copies().count() == 2);
}

#[test]
fn what_could_race_or_read_elsewhere_is_refused() {
    let model = random_model(2, &ModelShape::default());
    let at = |p: &StepProgram, wanted: fn(&Instr) -> bool| p.instrs.iter().position(wanted).unwrap();
    type Change = Box<dyn Fn(&mut StepProgram)>;
    let wait = |i: &Instr| matches!(i, Instr::WaitCopy { .. });
    let free = |i: &Instr| matches!(i, Instr::Free { .. });
    let linear = |i: &Instr| matches!(i, Instr::Op(Op::Linear { .. }));
    let first = move |p: &mut StepProgram, change: fn(&mut Segment)| {
        let n = at(p, linear);
        if let Instr::Op(Op::Linear { segments, .. }) = &mut p.instrs[n] {
            change(&mut segments[0]);
        }
    };
    let wrong: Vec<(&str, Change)> = vec![
        ("before its copy was waited for", Box::new(move |p| drop(p.instrs.remove(at(p, wait))))),
        ("overwritten while it may be read", Box::new(move |p| drop(p.instrs.remove(at(p, free))))),
        ("slot 0 of 0", Box::new(|p| p.slots = 0)),
        ("slots of", Box::new(|p| p.slot_bytes = 600)),
        ("can't compute from the file", Box::new(move |p| first(p, |s| s.place = Place::File))),
        ("rows 1 +", Box::new(move |p| first(p, |s| s.row = 1))),
        ("rows", Box::new(move |p| first(p, |s| s.rows = usize::MAX))),
        ("no tensor", Box::new(move |p| first(p, |s| s.tensor = TensorId(999)))),
        ("bytes at 8", Box::new(move |p| first(p, |s| s.place = Place::Resident { offset: 8 }))),
        ("bytes at", Box::new(move |p| first(p, |s| s.place = Place::Resident { offset: u64::MAX - 255 }))),
        ("without an activation", Box::new(|p| p.instrs.retain(|i| !matches!(i, Instr::Op(Op::Norm { .. }))))),
        ("layer 7", Box::new(|p| p.instrs.push(Instr::Op(Op::Attention { layer: 7 })))),
        ("not a vector", Box::new(|p| p.instrs.push(Instr::Op(Op::Norm { weight: TensorId(0), rows: RowSet::All })))),
        ("slot 9", Box::new(|p| p.instrs.push(Instr::Free { slot: 9 }))),
        ("of which 4 are wanted", Box::new(|p| p.max_rows = 3)),
        ("a program for 0 rows", Box::new(|p| (p.max_rows, p.max_wanted) = (0, 0))),
        (
            "columns",
            Box::new(move |p| {
                let n = at(p, linear);
                if let Instr::Op(Op::Linear { column, .. }) = &mut p.instrs[n] {
                    *column = 100;
                }
            }),
        ),
    ];
    for (message, change) in wrong {
        let mut program = streamed(&model, &[1], 1);
        assert!(plan(&program, &model).is_ok());
        change(&mut program);
        match plan(&program, &model) {
            Err(error) => assert!(error.contains(message), "{message}: {error}"),
            Ok(_) => panic!("{message}: accepted"),
        }
    }
}

#[test]
fn slabs_hold_their_planes_in_order_and_aligned() {
    let model = random_model(5, &ModelShape { formats: vec![Format::Q8_0], ..ModelShape::default() });
    let tensor = &model.tensors[model.lm_head.weight.0];
    assert_eq!(slab(tensor, 3), Some(([0, 0, 0], 3 * 68)));
    let n = headrace_numerics::format::Nbits {
        bits: 4,
        block: 32,
        scale: headrace_numerics::format::ScaleType::F16,
        zero: headrace_numerics::format::ZeroPoint::PerBlock,
    };
    let mut tensor = tensor.clone();
    (tensor.format, tensor.cols) = (Format::Nbits(n), 64);
    // 9 rows: 288 bytes of codes, 36 of scales, 9 of zero points.
    assert_eq!(slab(&tensor, 9), Some(([0, 512, 768], 777)));
    assert_eq!(slab(&tensor, usize::MAX), None);
}
