//! Kernel arguments of whole programs: addresses, bounds, constants.

use headrace_kv::KvLayout;
use headrace_numerics::format::Nbits;
use headrace_testing::{ModelShape, file_program, random_model};

use super::*;
use crate::plan::plan;
use headrace_provider::{Instr, Op, StepProgram};

fn geometry(model: &ModelSpec, layout: KvLayout, dtype: KvDtype) -> KvGeometry {
    let (kv_heads, head_dim) = (model.config.kv_heads, model.config.head_dim);
    KvGeometry { layers: model.layers.len(), kv_heads, head_dim, dtype, layout, page_tokens: 64 }
}

fn resident(model: &ModelSpec, cuts: usize) -> StepProgram {
    let mut program = file_program(model, 8, 4, ActivationWidth::Int16, cuts);
    let mut next = 0;
    for instr in &mut program.instrs {
        if let Instr::Op(Op::Linear { segments, .. }) = instr {
            for segment in segments {
                let (_, bytes) = slab(&model.tensors[segment.tensor.0], segment.rows).unwrap();
                segment.place = Place::Resident { offset: next };
                next += bytes.next_multiple_of(256);
            }
        }
    }
    program
}

fn addresses(model: &ModelSpec) -> Addresses {
    Addresses {
        buffers: [0x1000, 0x2000, 0x3000, 0x4000, 0x5000],
        weights: 1 << 40,
        staging: 2 << 40,
        kv: 3 << 40,
        vectors: (0..model.tensors.len()).map(|i| (TensorId(i), (4 << 40) + i as u64 * 0x1_0000)).collect(),
        partials: 77,
        ..Addresses::default()
    }
}

#[test]
fn every_row_of_every_matrix_is_read_once_and_lands_in_its_column() {
    let model = random_model(9, &ModelShape { bias: true, ..ModelShape::default() });
    let g = geometry(&model, KvLayout::HeadMajor, KvDtype::F16);
    let at = addresses(&model);
    let key = GraphKey { rows: 8, wanted: 2, chunks: 8 };
    for cuts in [1, 3, 7] {
        let plan = plan(&resident(&model, cuts), &model).unwrap();
        let width = ActivationWidth::Int16;
        let binder = Binder { model: &model, geometry: &g, at: &at, width, slot_bytes: 0, key };
        let mut qkv = vec![0; Buffer::Qkv.width(&model.config)];
        let mut total = 0;
        for task in plan.tasks() {
            for (launch, rows) in binder.bind(task).unwrap() {
                let Launch::Linear(_, args) = launch else { continue };
                assert_eq!((rows, args.x.ld), if args.wanted == 1 { (2, 8) } else { (8, 8) });
                assert_eq!(args.out == 0x5000, args.wanted == 1);
                for segment in &args.segment[..args.segments as usize] {
                    assert!(segment.column + segment.rows <= args.out_ld);
                    assert!(segment.planes[0] >= 1 << 40 && segment.planes[0].is_multiple_of(256));
                    assert!(segment.bias >= 4 << 40);
                    total += segment.rows;
                    if args.out == 0x2000 {
                        let columns = segment.column as usize..(segment.column + segment.rows) as usize;
                        qkv[columns].iter_mut().for_each(|n| *n += 1);
                    }
                }
            }
        }
        assert!(qkv.iter().all(|&n| n == model.layers.len()));
        let rows: usize = model
            .layers
            .iter()
            .flat_map(|l| l.qkv.iter().chain(&l.gate_up).chain([&l.o, &l.down]))
            .chain([&model.lm_head])
            .map(|l| model.tensors[l.weight.0].rows)
            .sum();
        assert_eq!(total as usize, rows);
    }
}

#[test]
fn a_slot_and_a_bias_are_addressed_by_their_rows() {
    let model = random_model(9, &ModelShape { bias: true, ..ModelShape::default() });
    let g = geometry(&model, KvLayout::HeadMajor, KvDtype::F16);
    let at = addresses(&model);
    let key = GraphKey { rows: 1, wanted: 1, chunks: 0 };
    let binder =
        Binder { model: &model, geometry: &g, at: &at, width: ActivationWidth::Int8, slot_bytes: 0x10_0000, key };
    let down = model.layers[1].down;
    let segment = headrace_provider::Segment {
        tensor: down.weight,
        row: 5,
        rows: 7,
        place: Place::Slot { slot: 3, offset: 0x200 },
    };
    let part = crate::plan::Part { segment, bias: down.bias, column: 5, accumulate: true };
    let task = LinearTask { rows: RowSet::All, out: Buffer::Residual, parts: vec![part; 9] };
    let launches = binder.linear(&task).unwrap();
    assert_eq!(launches.len(), 2, "nine segments are two launches");
    let Launch::Linear(_, args) = &launches[0] else { panic!() };
    assert_eq!(args.segment[0].planes[0], (2 << 40) + 0x30_0200);
    assert_eq!(args.segment[0].bias, at.vectors[&down.bias.unwrap()] + 20);
    assert_eq!((args.segment[0].accumulate, args.segments), (1, 8));
}

#[test]
fn pages_are_addressed_as_the_geometry_says() {
    let model = random_model(9, &ModelShape { head_dim: 16, kv_heads: 2, ..ModelShape::default() });
    let at = addresses(&model);
    for layout in [KvLayout::HeadMajor, KvLayout::SeqMajor] {
        for dtype in [KvDtype::F16, KvDtype::F32] {
            let g = geometry(&model, layout, dtype);
            let key = GraphKey { rows: 1, wanted: 1, chunks: 0 };
            let binder =
                Binder { model: &model, geometry: &g, at: &at, width: ActivationWidth::Int8, slot_bytes: 0, key };
            let kv = binder.pages(1);
            for (head, token) in [(0, 0), (1, 0), (0, 63), (1, 17)] {
                for (half, start) in [(KvHalf::Key, kv.key_offset), (KvHalf::Value, kv.value_offset)] {
                    let elements = token as u64 * u64::from(kv.token_stride) + head as u64 * u64::from(kv.head_stride);
                    assert_eq!(start + elements * dtype.bytes() as u64, g.offset(1, half, head, token) as u64);
                }
            }
            let Launch::Attention(a) = binder.attention(1).unwrap() else { panic!() };
            assert_eq!((a.partials, a.chunks), (0, 0), "a direct launch has no partial results");
        }
    }
}

#[test]
fn formats_have_the_constants_that_the_kernels_take() {
    let nbits = |bits, block, scale, zero| Format::Nbits(Nbits { bits, block, scale, zero });
    let (f16, f32) = (ScaleType::F16, ScaleType::F32);
    assert_eq!(format_constants(Format::Q4_K), (0, 0, 0));
    assert_eq!(format_constants(nbits(4, 32, f16, ZeroPoint::Midpoint)), (5, 0, 1));
    assert_eq!(format_constants(nbits(4, 128, f32, ZeroPoint::PerBlock)), (7, 0, 0));
    assert_eq!(format_constants(nbits(4, 16, f32, ZeroPoint::TwosComplement)), (4, 0x8888_8888, 0));
    assert_eq!(format_constants(nbits(8, 64, f16, ZeroPoint::Midpoint)), (6, 0x8080_8080, 1));
    assert_eq!(format_constants(nbits(8, 256, f32, ZeroPoint::TwosComplement)), (8, 0, 0));
}

#[test]
fn what_is_read_in_place_has_the_host_s_addresses_or_none_at_all() {
    let model = random_model(9, &ModelShape::default());
    let g = geometry(&model, KvLayout::HeadMajor, KvDtype::F16);
    let mut program = resident(&model, 2);
    let mut moved = None;
    for instr in &mut program.instrs {
        if let Instr::Op(Op::Linear { segments, .. }) = instr {
            let last = segments.last_mut().unwrap();
            (last.place, moved) = (Place::HostMapped, Some(*last));
        }
    }
    let moved = moved.unwrap();
    let plan = plan(&program, &model).unwrap();
    assert!(plan.tasks().any(Task::reads_host) && plan.segments().any(|s| s.place == Place::HostMapped));
    let mut at = addresses(&model);
    let key = GraphKey { rows: 8, wanted: 2, chunks: 8 };
    let bind = |at: &Addresses| {
        let width = ActivationWidth::Int16;
        let binder = Binder { model: &model, geometry: &g, at, width, slot_bytes: 0, key };
        plan.tasks().map(|task| binder.bind(task)).collect::<Result<Vec<_>, _>>()
    };
    let error = bind(&at).unwrap_err();
    assert!(error.contains("on the host have no address"), "{error}");
    for (i, s) in plan.segments().filter(|s| s.place == Place::HostMapped).enumerate() {
        let base = (5 << 40) + (i as u64) * 4096;
        at.host_mapped.insert((s.tensor, s.row, s.rows), [base, base + 16, base + 32]);
    }
    let expected = at.host_mapped[&(moved.tensor, moved.row, moved.rows)];
    let launches = bind(&at).unwrap();
    let linear = launches.iter().flatten().filter_map(|(launch, _)| match launch {
        Launch::Linear(_, args) => Some(args),
        _ => None,
    });
    let mut found = linear.flat_map(|args| &args.segment[..args.segments as usize]);
    assert!(found.any(|segment| segment.planes == expected));
}

#[test]
fn every_step_of_several_rows_is_laid_out_for_tensor_cores() {
    assert_eq!([1, 2, 3, 4, 5, 8, 9, 512].map(leading_rows), [1, 8, 8, 8, 8, 8, 16, 512]);
}
