//! The plainest step program of a model: every tensor whole, in the file.

use headrace_model::ModelSpec;
use headrace_model::spec::Linear;
use headrace_numerics::activation::ActivationWidth;
use headrace_provider::{Buffer, Instr, Op, Place, RowSet, Segment, StepProgram};

/// Every operation of one step of `model`, every tensor in `Place::File`, each linear layer cut in `cuts` segments.
pub fn file_program(
    model: &ModelSpec,
    max_rows: usize,
    max_wanted: usize,
    activations: ActivationWidth,
    cuts: usize,
) -> StepProgram {
    let mut instrs = Vec::new();
    let linear = |instrs: &mut Vec<Instr>, linears: &[Linear], out: Buffer, accumulate: bool| {
        let mut column = 0;
        for l in linears {
            let rows = model.tensor(l.weight).rows;
            let step = rows.div_ceil(cuts.max(1)).max(1);
            let segments = (0..rows)
                .step_by(step)
                .map(|row| Segment { tensor: l.weight, row, rows: step.min(rows - row), place: Place::File })
                .collect();
            instrs.push(Instr::Op(Op::Linear { segments, bias: l.bias, out, column, accumulate }));
            column += rows;
        }
    };
    instrs.push(Instr::Op(Op::Embed { table: model.embedding }));
    for (i, layer) in model.layers.iter().enumerate() {
        instrs.push(Instr::Op(Op::Norm { weight: layer.attn_norm, rows: RowSet::All }));
        linear(&mut instrs, &layer.qkv, Buffer::Qkv, false);
        instrs.push(Instr::Op(Op::RopeAppend { layer: i }));
        instrs.push(Instr::Op(Op::Attention { layer: i }));
        instrs.push(Instr::Op(Op::Quantise));
        linear(&mut instrs, &[layer.o], Buffer::Residual, true);
        instrs.push(Instr::Op(Op::Norm { weight: layer.ffn_norm, rows: RowSet::All }));
        linear(&mut instrs, &layer.gate_up, Buffer::GateUp, false);
        instrs.push(Instr::Op(Op::Swiglu));
        linear(&mut instrs, &[layer.down], Buffer::Residual, true);
    }
    instrs.push(Instr::Op(Op::Norm { weight: model.final_norm, rows: RowSet::Wanted }));
    linear(&mut instrs, &[model.lm_head], Buffer::Logits, false);
    instrs.push(Instr::Op(Op::Argmax));
    StepProgram { instrs, activations, max_rows, max_wanted, slot_bytes: 0, slots: 0 }
}
