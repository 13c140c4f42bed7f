//! A model's step as a program in read order, every weight read in place from its file.

use headrace_model::ModelSpec;
use headrace_model::spec::{Linear, TensorId};
use headrace_provider::{Buffer, Instr, Op, Place, RowSet, Segment, StepProgram};

use crate::options::EngineOptions;

/// The operations of one step in read order, with whole tensors as segments, all of them in `Place::File`.
///
/// The order of the weights is that of [`ModelSpec::read_order`], less the embedding, of which a step reads single rows.
pub fn operations(model: &ModelSpec) -> Vec<Op> {
    let mut ops = vec![Op::Embed { table: model.embedding }];
    for (index, layer) in model.layers.iter().enumerate() {
        ops.push(Op::Norm { weight: layer.attn_norm, rows: RowSet::All });
        push_linears(&mut ops, model, &layer.qkv, Buffer::Qkv, false);
        ops.push(Op::RopeAppend { layer: index });
        ops.push(Op::Attention { layer: index });
        ops.push(Op::Quantise);
        push_linears(&mut ops, model, &[layer.o], Buffer::Residual, true);
        ops.push(Op::Norm { weight: layer.ffn_norm, rows: RowSet::All });
        push_linears(&mut ops, model, &layer.gate_up, Buffer::GateUp, false);
        ops.push(Op::Swiglu);
        push_linears(&mut ops, model, &[layer.down], Buffer::Residual, true);
    }
    ops.push(Op::Norm { weight: model.final_norm, rows: RowSet::Wanted });
    push_linears(&mut ops, model, &[model.lm_head], Buffer::Logits, false);
    ops.push(Op::Argmax);
    ops
}

fn push_linears(ops: &mut Vec<Op>, model: &ModelSpec, linears: &[Linear], out: Buffer, accumulate: bool) {
    let mut column = 0;
    for linear in linears {
        let rows = model.tensor(linear.weight).rows;
        ops.push(Op::Linear { segments: vec![whole(linear.weight, rows)], bias: linear.bias, out, column, accumulate });
        column += rows;
    }
}

fn whole(tensor: TensorId, rows: usize) -> Segment {
    Segment { tensor, row: 0, rows, place: Place::File }
}

/// The program of a device that reads the file's mapping in place.
pub fn in_place(model: &ModelSpec, options: &EngineOptions) -> StepProgram {
    StepProgram {
        instrs: operations(model).into_iter().map(Instr::Op).collect(),
        activations: options.activations,
        max_rows: options.max_rows(),
        max_wanted: options.max_wanted(model.config.vocab),
        slot_bytes: 0,
        slots: 0,
    }
}

/// The matrices of the linear layers as a step reads them whole, one entry a read: a matrix that several layers share stands
/// here as often as it is read.
pub fn linear_tensors(model: &ModelSpec) -> Vec<TensorId> {
    let mut ids: Vec<TensorId> = Vec::new();
    for layer in &model.layers {
        ids.extend(layer.qkv.iter().map(|l| l.weight));
        ids.push(layer.o.weight);
        ids.extend(layer.gate_up.iter().map(|l| l.weight));
        ids.push(layer.down.weight);
    }
    ids.push(model.lm_head.weight);
    ids
}

/// Bytes of weights that one step reads: every tensor but the embedding, which is read by rows (unless it is the head
/// too), and a matrix that layers share once for each of them.
pub fn bytes_per_step(model: &ModelSpec) -> u64 {
    let matrices = linear_tensors(model);
    let others = model.read_order().into_iter().filter(|t| *t != model.embedding && !matrices.contains(t));
    let all: Vec<TensorId> = others.chain(matrices.iter().copied()).collect();
    all.into_iter().map(|t| model.tensor(t).bytes() as u64).sum()
}
