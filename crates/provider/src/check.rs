//! What a step program may say of a model, whatever the device: shapes, rows, columns, the activation that is read.

use headrace_model::ModelSpec;
use headrace_model::spec::{Tensor, TensorId};

use crate::program::{Buffer, Instr, Op, RowSet, Segment, StepProgram};

/// Checks `program` against `model`: tensors, rows and layers exist, shapes fit each other and the buffers, and every linear
/// layer has an activation of its width. Where weights lie and how slots are used is the device's to check.
///
/// # Errors
/// The number of the first instruction that is wrong, and what is wrong with it.
pub fn check(program: &StepProgram, model: &ModelSpec) -> Result<(), String> {
    let StepProgram { max_rows, max_wanted, .. } = *program;
    if max_rows == 0 || max_wanted > max_rows {
        return Err(format!("a program for {max_rows} rows of which {max_wanted} are wanted"));
    }
    let mut check = Check { model, activation: None };
    for (i, instr) in program.instrs.iter().enumerate() {
        let checked = match instr {
            Instr::Op(op) => check.op(op),
            Instr::Copy { segments, .. } => segments.iter().try_for_each(|s| check.segment(s).map(drop)),
            Instr::WaitCopy { .. } | Instr::Free { .. } => Ok(()),
        };
        checked.map_err(|what| format!("instruction {i}: {what}"))?;
    }
    Ok(())
}

struct Check<'a> {
    model: &'a ModelSpec,
    /// Rows and width of the activation that linear layers read.
    activation: Option<(RowSet, usize)>,
}

impl Check<'_> {
    fn tensor(&self, id: TensorId) -> Result<&Tensor, String> {
        self.model.tensors.get(id.0).ok_or_else(|| format!("the model has no tensor {}", id.0))
    }

    fn vector(&self, id: TensorId, len: usize) -> Result<(), String> {
        let tensor = self.tensor(id)?;
        if (tensor.rows, tensor.cols) != (1, len) {
            return Err(format!("{} is {} x {}, not a vector of {len}", tensor.name, tensor.rows, tensor.cols));
        }
        Ok(())
    }

    fn segment(&self, segment: &Segment) -> Result<&Tensor, String> {
        let tensor = self.tensor(segment.tensor)?;
        if segment.row.checked_add(segment.rows).is_none_or(|end| end > tensor.rows) || segment.rows == 0 {
            return Err(format!("{}: rows {} + {} of {}", tensor.name, segment.row, segment.rows, tensor.rows));
        }
        Ok(tensor)
    }

    fn op(&mut self, op: &Op) -> Result<(), String> {
        let config = &self.model.config;
        match op {
            Op::Embed { table } => {
                let tensor = self.tensor(*table)?;
                if (tensor.rows, tensor.cols) != (config.vocab, config.hidden) {
                    return Err(format!("an embedding of {} x {}", tensor.rows, tensor.cols));
                }
            }
            Op::Norm { weight, rows } => {
                self.vector(*weight, config.hidden)?;
                self.activation = Some((*rows, config.hidden));
            }
            Op::Quantise => self.activation = Some((RowSet::All, Buffer::Attention.width(config))),
            Op::Swiglu => self.activation = Some((RowSet::All, config.ffn)),
            Op::Linear { segments, bias, out, column, .. } => self.linear(segments, *bias, *out, *column)?,
            Op::RopeAppend { layer } | Op::Attention { layer } => {
                let layers = &self.model.layers;
                let l = layers.get(*layer).ok_or_else(|| format!("layer {layer} of {}", layers.len()))?;
                [l.q_norm, l.k_norm].into_iter().flatten().try_for_each(|norm| self.vector(norm, config.head_dim))?;
            }
            Op::Argmax => {}
        }
        Ok(())
    }

    fn linear(&self, segments: &[Segment], bias: Option<TensorId>, out: Buffer, column: usize) -> Result<(), String> {
        let Some((rows, width)) = self.activation else {
            return Err("a linear layer without an activation".to_string());
        };
        if (out == Buffer::Logits) != (rows == RowSet::Wanted) {
            return Err(format!("{rows:?} rows into {out:?}"));
        }
        for segment in segments {
            if segments.first().is_some_and(|first| first.tensor != segment.tensor) {
                return Err("segments of two tensors".to_string());
            }
            let tensor = self.segment(segment)?;
            if tensor.cols != width {
                return Err(format!("{} has {} columns, the activation {width}", tensor.name, tensor.cols));
            }
            let end = column.checked_add(segment.row).and_then(|c| c.checked_add(segment.rows));
            let columns = out.width(&self.model.config);
            if end.is_none_or(|end| end > columns) {
                return Err(format!("columns {column} + {} + {} of {out:?}: {columns}", segment.row, segment.rows));
            }
            bias.map_or(Ok(()), |bias| self.vector(bias, tensor.rows))?;
        }
        Ok(())
    }
}
