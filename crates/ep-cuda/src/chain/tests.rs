//! Which tasks become chains, and what their lists say.

use headrace_kv::KvLayout;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::format::{Nbits, ZeroPoint};
use headrace_provider::program::PLANE_ALIGN;
use headrace_provider::{Instr, Op, StepProgram};
use headrace_testing::{ModelShape, file_program, random_model};

use super::lists::Lists;
use super::*;
use crate::bind::{Addresses, Binder};
use crate::buckets::GraphKey;
use crate::plan::{plan, slab};

const HALF: Format = Format::Nbits(Nbits { bits: 4, block: 32, scale: ScaleType::F16, zero: ZeroPoint::Midpoint });

fn model() -> ModelSpec {
    random_model(
        3,
        &ModelShape {
            hidden: 512,
            heads: 8,
            kv_heads: 2,
            head_dim: 64,
            rope_dims: 64,
            ffn: 1024,
            bias: true,
            formats: vec![HALF],
            ..ModelShape::default()
        },
    )
}

fn geometry(model: &ModelSpec, dtype: KvDtype) -> KvGeometry {
    KvGeometry {
        layers: model.layers.len(),
        kv_heads: model.config.kv_heads,
        head_dim: model.config.head_dim,
        dtype,
        layout: KvLayout::HeadMajor,
        page_tokens: 32,
    }
}

/// A program whose linear layers are resident but for those of these numbers.
fn program(model: &ModelSpec, cold: &[usize]) -> StepProgram {
    let mut program = file_program(model, 8, 4, ActivationWidth::Int16, 1);
    let (mut next, mut n) = (0, 0);
    let mut instrs = Vec::new();
    for mut instr in std::mem::take(&mut program.instrs) {
        let mut streams = false;
        if let Instr::Op(Op::Linear { segments, .. }) = &mut instr {
            streams = cold.contains(&n);
            n += 1;
            for segment in segments {
                let (_, bytes) = slab(&model.tensors[segment.tensor.0], segment.rows).unwrap();
                segment.place = match streams {
                    true => Place::Slot { slot: 0, offset: 0 },
                    false => Place::Resident { offset: next },
                };
                next += bytes.next_multiple_of(PLANE_ALIGN as u64);
            }
        }
        if streams {
            instrs.push(Instr::WaitCopy { slot: 0 });
        }
        instrs.push(instr);
    }
    (program.slots, program.slot_bytes, program.instrs) = (1, 1 << 24, instrs);
    program
}

fn find(model: &ModelSpec, cold: &[usize], dtype: KvDtype, chunks: usize) -> (CapturePlan, Vec<Chain>) {
    let plan = plan(&program(model, cold), model).unwrap();
    let chains = chains(&plan, model, &geometry(model, dtype), chunks);
    (plan, chains)
}

#[test]
fn a_resident_step_is_one_chain_between_embedding_and_choice() {
    let model = model();
    let (plan, chains) = find(&model, &[], KvDtype::F16, 8);
    let [chain] = &chains[..] else { panic!("{chains:?}") };
    assert_eq!(chain.actions, 1..plan.actions.len() - 1);
    assert!(matches!(plan.actions[0], Action::Launch(Task::Embed(_))));
    assert!(matches!(plan.actions.last(), Some(Action::Launch(Task::Argmax))));
    // qkv, attention, its combination, o, gate and up, SwiGLU, down; and the head.
    assert_eq!(chain.links.len(), 2 * 7 + 1);
    let norms = chain.links.iter().filter(|l| matches!(l, Link::Linear { norm: Some(_), .. })).count();
    assert_eq!(norms, 2 * 2 + 1);
    assert_eq!(chain.segments, 2 * (3 + 1 + 2 + 1) + 1);
}

#[test]
fn a_norm_joins_only_with_everything_that_reads_it() {
    let model = model();
    // Linear layer 5 is the second matrix of gate and up: read through the ring.
    let (plan, chains) = find(&model, &[5], KvDtype::F16, 8);
    let [first, second] = &chains[..] else { panic!("{chains:?}") };
    // What the chains leave out: the embedding, the norm, gate and up, and the choice.
    let left: Vec<usize> = (0..plan.actions.len()).filter(|i| chains.iter().all(|c| !c.actions.contains(i))).collect();
    let is_norm =
        |a: &Action| matches!(a, Action::Launch(Task::Activate(ActivationTask { source: Source::Norm(_), .. })));
    assert!(is_norm(&plan.actions[first.actions.end]), "{:?}", plan.actions[first.actions.end]);
    assert_eq!(left.iter().filter(|&&i| matches!(plan.actions[i], Action::Launch(Task::Linear(_)))).count(), 1);
    assert_eq!(second.actions.start, first.actions.end + 2);
    assert!(matches!(second.links[0], Link::Swiglu { .. }));
}

#[test]
fn what_the_kernel_does_not_serve_is_left_out() {
    let model = model();
    // 32-bit pages, or no room for partial results: attention stays apart.
    for (dtype, chunks) in [(KvDtype::F32, 8), (KvDtype::F16, 0)] {
        let (plan, chains) = find(&model, &[], dtype, chunks);
        let attention = plan.actions.iter().position(|a| matches!(a, Action::Launch(Task::Attention(_)))).unwrap();
        assert!(chains.iter().all(|c| !c.actions.contains(&attention)));
        assert!(!chains.is_empty());
    }
    let odd = |hidden, formats| ModelShape {
        hidden,
        ffn: 1024,
        heads: 8,
        head_dim: 64,
        rope_dims: 64,
        formats,
        ..Default::default()
    };
    let zeros = Format::Nbits(Nbits { bits: 4, block: 32, scale: ScaleType::F16, zero: ZeroPoint::PerBlock });
    for shape in [odd(512, vec![Format::Q4_0]), odd(512, vec![zeros])] {
        assert!(find(&random_model(1, &shape), &[], KvDtype::F16, 8).1.is_empty());
    }
    // 320 columns are no whole number of steps: qkv, gate and up stay apart with their norms.
    let (_, chains) = find(&random_model(1, &odd(320, vec![HALF])), &[], KvDtype::F16, 8);
    let normed = |l: &Link| matches!(l, Link::Linear { norm: Some(_), .. });
    assert!(chains.len() == 4 && !chains.iter().any(|c| c.links.iter().any(normed)), "{chains:?}");
}

#[test]
fn lists_hold_every_row_of_every_matrix_once() {
    let model = model();
    let (plan, chains) = find(&model, &[], KvDtype::F16, 8);
    let vectors = (0..model.tensors.len()).map(|t| (TensorId(t), 0x1000 * (t as u64 + 1))).collect();
    let at = Addresses { vectors, weights: 1 << 40, ..Addresses::default() };
    let geometry = geometry(&model, KvDtype::F16);
    let binder = Binder {
        model: &model,
        geometry: &geometry,
        at: &at,
        width: ActivationWidth::Int16,
        slot_bytes: 0,
        key: GraphKey { rows: 1, wanted: 1, chunks: 8 },
    };
    let (blocks, warps) = (4, 15);
    let mut lists = Lists::new(&plan, &binder, (blocks, warps));
    for link in &chains[0].links {
        lists.add(*link).unwrap();
    }
    let mut segments = lists.segments.iter();
    let (mut before, mut first) = (0, 0);
    for m in &lists.matrices {
        assert_eq!((m.first, m.segment), (before % warps as u32, first));
        before += m.units.div_ceil(blocks as u32);
        first += m.segments;
        let mut units = 0;
        for s in segments.by_ref().take(m.segments as usize) {
            assert_eq!(s.before, units);
            units += s.rows.div_ceil(4);
            assert!(s.codes >= 1 << 40 && s.scales > s.codes);
        }
        assert_eq!(units, m.units);
        assert!(m.blocks == 512 / 32 || m.blocks == 1024 / 32);
    }
    assert!(segments.next().is_none());
    let rows: u32 = lists.segments.iter().map(|s| s.rows).sum();
    let expected = (8 + 2 * 2) * 64 + 512 + 2 * 1024 + 512;
    assert_eq!(rows, 2 * expected + 97);
    // Layers before attention ask for its pages; kinds and indices follow each other.
    assert_eq!(lists.linears.iter().filter(|l| l.kv > 0).count(), 2);
    assert_eq!(lists.linears[0].kv, 1);
    let (image, args) = chains[0].lists(&plan, &binder, 1 << 20, (blocks, warps)).unwrap();
    assert_eq!(image.len() as u64, chains[0].bytes());
    assert_eq!((args.tasks, args.linears), (15, 9));
    assert!(image[..8].iter().all(|&b| b == 0), "the barrier starts at zero");
    let word = |at: u64| u32::from_le_bytes(image[at as usize..at as usize + 4].try_into().unwrap());
    assert_eq!(args.table_bytes as usize, (9 * 32 + lists.segments.len() * 40 + 15 * 8).next_multiple_of(16));
    let at = args.table - (1 << 20) + u64::from(args.linears) * 32 + u64::from(args.segments) * 40;
    let tasks: Vec<(u32, u32)> = (0..7).map(|i| (word(at + i * 8), word(at + i * 8 + 4))).collect();
    assert_eq!(tasks, [(0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (3, 2), (0, 3)]);
}

#[test]
fn shared_memory_holds_the_widest_activation() {
    let model = model();
    let (plan, chains) = find(&model, &[], KvDtype::F16, 8);
    let area = chains[0].area(&plan, &model, 64);
    // 512 columns with their norm take more than 1024, SwiGLU's, without.
    assert_eq!(area.activation, 512 / 32 * 72 + 512 * 4);
    assert_eq!((area.keys, area.query, area.share), (2 * 32 * 64 * 2, 96 * 4, 4));
    assert_eq!(area.table, (9 * 32 + chains[0].segments * 40 + 15 * 8).next_multiple_of(16));
}

#[test]
fn weights_that_are_read_in_place_on_the_host_are_in_no_chain() {
    let model = model();
    let mut program = program(&model, &[]);
    let linears = program.instrs.iter_mut().filter_map(|instr| match instr {
        Instr::Op(Op::Linear { segments, .. }) => Some(segments),
        _ => None,
    });
    for segments in linears.skip(3).step_by(4) {
        segments.iter_mut().for_each(|s| s.place = Place::HostMapped);
    }
    let plan = plan(&program, &model).unwrap();
    let on_host: Vec<usize> = (0..plan.actions.len())
        .filter(|&i| matches!(&plan.actions[i], Action::Launch(task) if task.reads_host()))
        .collect();
    let chains = chains(&plan, &model, &geometry(&model, KvDtype::F16), 8);
    assert!(!on_host.is_empty() && !chains.is_empty());
    assert!(chains.iter().all(|chain| on_host.iter().all(|i| !chain.actions.contains(i))));
}
