//! What a provider refuses, and that it refuses with an error before anything is computed.
#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking

use std::sync::Arc;

use headrace_ep_cpu::{CpuOptions, CpuProvider};
use headrace_kv::KvGeometry;
use headrace_kv::geometry::KvLayout;
use headrace_model::ModelSpec;
use headrace_model::spec::TensorId;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::elementwise::KvDtype;
use headrace_numerics::format::Format;
use headrace_provider::{
    Buffer, DeviceError, Instr, Op, Place, ProgramId, Provider, RangeKind, RowSet, Segment, StepInput, StepOutput,
    StepProgram, TokenRow,
};
use headrace_testing::{ModelShape, bits, file_program, random_model};

const PAGES: usize = 3;

fn shape() -> ModelShape {
    ModelShape {
        rope_tables: Some(Format::F32),
        max_context: 70,
        col_major: true,
        formats: vec![Format::F16],
        ..ModelShape::default()
    }
}

fn geometry(model: &ModelSpec) -> KvGeometry {
    KvGeometry {
        layers: model.layers.len(),
        kv_heads: model.config.kv_heads,
        head_dim: model.config.head_dim,
        dtype: KvDtype::F16,
        layout: KvLayout::HeadMajor,
        page_tokens: 32,
    }
}

fn attached() -> (CpuProvider, Arc<ModelSpec>, StepProgram) {
    let model = Arc::new(random_model(5, &shape()));
    let mut cpu = CpuProvider::new(CpuOptions { threads: Some(2), level: None }).unwrap();
    cpu.attach(model.clone(), geometry(&model)).unwrap();
    let program = file_program(&model, 4, 2, ActivationWidth::Int16, 1);
    cpu.resize(RangeKind::Workspace, program.workspace_bytes(&model.config)).unwrap();
    cpu.resize(RangeKind::Kv, (PAGES * geometry(&model).page_bytes()) as u64).unwrap();
    (cpu, model, program)
}

fn input(position: usize, token: u32) -> StepInput {
    StepInput {
        rows: vec![TokenRow { sequence: 0, position, token: token.into() }],
        page_tables: vec![vec![2, 0, 1]],
        wanted: vec![0],
        want_logits: true,
    }
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, DeviceError>, part: &str) {
    match result {
        Err(DeviceError::Invalid { what, .. }) => assert!(what.contains(part), "{what:?} doesn't say {part:?}"),
        other => panic!("{other:?} instead of a refusal with {part:?}"),
    }
}

#[test]
fn inputs_out_of_range() {
    let (mut cpu, model, program) = attached();
    let id = cpu.record(program).unwrap();
    let mut out = StepOutput::default();
    let mut run = |input: &StepInput| cpu.run(id, input, &mut out);
    run(&input(0, 1)).unwrap();
    refused(run(&StepInput { rows: vec![], ..input(0, 1) }), "0 rows");
    refused(run(&input(0, model.config.vocab as u32)), "vocabulary");
    refused(run(&input(96, 1)), "position 96");
    refused(run(&input(70, 1)), "RoPE tables");
    refused(run(&StepInput { page_tables: vec![], ..input(0, 1) }), "sequence 0");
    // More pages than fit in the granules that back the range.
    refused(run(&StepInput { page_tables: vec![vec![1_000_000]], ..input(0, 1) }), "page 1000000");
    refused(run(&StepInput { wanted: vec![1], ..input(0, 1) }), "wanted");
    let rows: Vec<TokenRow> = (0..5).map(|position| TokenRow { sequence: 0, position, token: 1.into() }).collect();
    refused(run(&StepInput { rows: rows.clone(), ..input(0, 1) }), "5 rows");
    let rows = &rows[..4];
    refused(run(&StepInput { rows: rows.to_vec(), wanted: vec![0, 1, 2], ..input(0, 1) }), "3 wanted");
    refused(run(&StepInput { rows: rows.to_vec(), wanted: vec![1, 0], ..input(0, 1) }), "increasing");
    let back = [rows[1], rows[0]];
    refused(run(&StepInput { rows: back.to_vec(), ..input(0, 1) }), "not increasing");
    run(&input(1, 1)).unwrap();
}

#[test]
fn programs_that_do_not_fit_the_model() {
    let (mut cpu, _, program) = attached();
    let with = |op: Op| StepProgram { instrs: vec![Instr::Op(op)], ..program.clone() };
    refused(cpu.record(with(Op::Embed { table: TensorId(10_000) })), "no tensor");
    refused(cpu.record(with(Op::RopeAppend { layer: 2 })), "layer 2 of 2");
    refused(cpu.record(with(Op::Norm { weight: TensorId(0), rows: RowSet::All })), "not a vector");
    refused(cpu.record(StepProgram { instrs: vec![Instr::WaitCopy { slot: 0 }], ..program.clone() }), "staging ring");
    refused(cpu.record(StepProgram { max_rows: 4000, ..program.clone() }), "workspace");
    refused(cpu.record(StepProgram { max_wanted: 5, ..program.clone() }), "wanted");
    // Every linear layer, damaged in one way each.
    let linears = program.instrs.iter().enumerate().filter(|(_, i)| matches!(i, Instr::Op(Op::Linear { .. })));
    for (at, _) in linears {
        let mut damage = |change: &dyn Fn(&mut Op), part: &str| {
            let mut program = program.clone();
            let Instr::Op(op) = &mut program.instrs[at] else { unreachable!() };
            change(op);
            refused(cpu.record(program), part);
        };
        let segment = |f: &dyn Fn(&mut headrace_provider::Segment), op: &mut Op| {
            if let Op::Linear { segments, .. } = op {
                f(&mut segments[0]);
            }
        };
        damage(&|op| segment(&|s| s.rows += 1, op), "rows");
        damage(&|op| segment(&|s| s.row = usize::MAX, op), "rows");
        damage(&|op| segment(&|s| s.place = Place::Resident { offset: 0 }, op), "place");
        damage(&|op| segment(&|s| s.tensor = TensorId(10_000), op), "no tensor");
        damage(
            &|op| {
                if let Op::Linear { column, .. } = op {
                    *column = usize::MAX;
                }
            },
            "columns",
        );
        damage(
            &|op| {
                if let Op::Linear { out, .. } = op {
                    *out = if *out == Buffer::Logits { Buffer::Qkv } else { Buffer::Logits };
                }
            },
            "rows into",
        );
    }
    let linear = program.instrs.iter().find(|i| matches!(i, Instr::Op(Op::Linear { .. }))).unwrap().clone();
    // The first layer reads a norm of the residual, not what SwiGLU made.
    let instrs = vec![Instr::Op(Op::Swiglu), linear.clone()];
    refused(cpu.record(StepProgram { instrs, ..program.clone() }), "columns, the activation");
    refused(cpu.record(StepProgram { instrs: vec![linear], ..program.clone() }), "without an activation");
}

#[test]
fn a_provider_without_a_model_or_with_two() {
    let mut cpu = CpuProvider::new(CpuOptions { threads: Some(1), level: None }).unwrap();
    let model = Arc::new(random_model(5, &shape()));
    refused(cpu.resize(RangeKind::Kv, 1), "no model");
    refused(cpu.record(file_program(&model, 1, 1, ActivationWidth::Int16, 1)), "no model");
    refused(cpu.run(ProgramId(0), &input(0, 0), &mut StepOutput::default()), "no model");
    refused(cpu.resize(RangeKind::Weights, 1), "Weights");
    refused(cpu.map(RangeKind::Weights, 0, 1 << 16), "own mapping");
    refused(cpu.unmap(RangeKind::Workspace, 0, 1 << 16), "new size");
    let segment = Segment { tensor: model.lm_head.weight, row: 0, rows: 1, place: Place::Resident { offset: 0 } };
    refused(cpu.load(&[segment]), "own mapping");
    assert_eq!((cpu.fixed_bytes(), cpu.info().piece_bytes), (0, 0));
    let odd = KvGeometry { page_tokens: 33, ..geometry(&model) };
    refused(cpu.attach(model.clone(), odd), "33");
    cpu.attach(model.clone(), geometry(&model)).unwrap();
    refused(cpu.attach(model.clone(), geometry(&model)), "already");
    refused(CpuProvider::new(CpuOptions { threads: Some(0), level: None }).map(|_| ()), "0 threads");
    let transposed: u64 = model
        .tensors
        .iter()
        .filter(|t| t.rows > 1 && t.name != "cos" && t.name != "sin")
        .map(|t| t.bytes() as u64)
        .sum();
    assert_eq!(cpu.info().repacked_bytes, transposed);
}

#[test]
fn ranges_copy_read_and_write_within_their_bounds() {
    let (mut cpu, _, program) = attached();
    let mapped = cpu.mapped(RangeKind::Kv);
    assert!(mapped.is_multiple_of(cpu.info().granule));
    cpu.write(RangeKind::Kv, mapped - 4, &[1, 2, 3, 4]).unwrap();
    cpu.copy_within(RangeKind::Kv, mapped - 4, 8, 4).unwrap();
    let mut back = [0; 6];
    cpu.read(RangeKind::Kv, 7, &mut back).unwrap();
    assert_eq!(back, [0, 1, 2, 3, 4, 0]);
    refused(cpu.write(RangeKind::Kv, mapped - 3, &[0; 4]), "not mapped");
    refused(cpu.read(RangeKind::Kv, u64::MAX, &mut back), "not mapped");
    refused(cpu.copy_within(RangeKind::Kv, 0, mapped, 1), "not mapped");
    // A program whose workspace went away is refused, and works again when it is back.
    let id = cpu.record(program).unwrap();
    let had = cpu.mapped(RangeKind::Workspace);
    let mut out = StepOutput::default();
    cpu.run(id, &input(0, 3), &mut out).unwrap();
    let logits = bits(&out.logits);
    cpu.resize(RangeKind::Workspace, 0).unwrap();
    refused(cpu.run(id, &input(0, 3), &mut out), "workspace");
    cpu.resize(RangeKind::Workspace, had).unwrap();
    cpu.run(id, &input(0, 3), &mut out).unwrap();
    assert_eq!(bits(&out.logits), logits);
    cpu.discard(id);
    refused(cpu.run(id, &input(0, 3), &mut out), "no program");
    assert!(cpu.resize(RangeKind::Kv, u64::MAX).is_err());
    assert_eq!(cpu.mapped(RangeKind::Kv), mapped);
}
