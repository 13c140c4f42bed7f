//! Activations: norm, attention output or SwiGLU, then quantised or kept as floats; by every worker for itself where
//! that is cheaper than a barrier, else a row each.

use headrace_provider::{Buffer, RowSet};

use super::{Scratch, Step};
use crate::compile::{Activation, Source, Stage};
use crate::kernels::elementwise::swiglu;
use crate::kernels::norm::rms_norm;

/// Elements that a worker rather computes itself, in addition to its share, than waits at a barrier for others to do.
/// A barrier takes about a microsecond; norm and quantisation take about a third of a nanosecond an element.
const REDUNDANT_ELEMENTS: usize = 3072;

impl Step<'_> {
    /// Makes the activation. True if it is in this worker's own scratch, so that no barrier is needed.
    pub(super) fn activate(&self, stage: &Stage, a: &Activation, scratch: &mut Scratch) -> Result<bool, String> {
        let rows = self.rows(a.rows);
        let extra = (rows - rows.div_ceil(self.workers)) * a.width;
        let private = a.private && self.workers > 1 && (rows <= 1 || extra <= REDUNDANT_ELEMENTS);
        let Scratch { codes, floats, .. } = scratch;
        if private {
            codes.prepare(rows, a.width, self.compiled.program.activations);
            grow(floats, rows * a.width);
            for row in 0..rows {
                let x = &mut floats[row * a.width..(row + 1) * a.width];
                let x = self.make(a, row, x)?;
                if a.quantised {
                    codes.quantise_row(self.level, row, x);
                }
                if a.float && a.source == Source::Attention {
                    floats[row * a.width..(row + 1) * a.width].copy_from_slice(self.attention(row, a.width));
                }
            }
            return Ok(true);
        }
        let shared = &self.shared[a.shape];
        grow(floats, a.width);
        self.draw(&stage.next[0], rows, |row| {
            let x = self.make(a, row, &mut floats[..a.width])?;
            if a.quantised {
                // SAFETY: a row is drawn once, and nobody reads the activation before the barrier.
                unsafe { shared.codes.quantise_row(self.level, row, x) };
            }
            if a.float {
                // SAFETY: as above.
                unsafe { shared.float_row(row) }.copy_from_slice(x);
            }
            Ok(())
        })?;
        Ok(false)
    }

    /// One row of an activation as floats: in `out`, or where it is already.
    fn make<'x>(&'x self, a: &Activation, row: usize, out: &'x mut [f32]) -> Result<&'x [f32], String> {
        match a.source {
            Source::Norm(weight) => {
                let row = match a.rows {
                    RowSet::All => row,
                    RowSet::Wanted => self.input.wanted[row],
                };
                let weight = self.weights.vector(weight, a.width)?;
                // SAFETY: the residual was written before the last barrier; nothing writes it before the next one
                // (private activations whose source is overwritten are ruled out when a program is compiled).
                let x = unsafe { self.buffers.row(Buffer::Residual, row, 0..a.width) };
                rms_norm(self.level, x, weight, self.model.config.norm_eps, out);
                Ok(out)
            }
            Source::Attention => Ok(self.attention(row, a.width)),
            Source::Swiglu => {
                // SAFETY: as for the residual.
                let x = unsafe { self.buffers.row(Buffer::GateUp, row, 0..2 * a.width) };
                let (gate, up) = x.split_at(a.width);
                swiglu(self.level, gate, up, out);
                Ok(out)
            }
        }
    }

    fn attention(&self, row: usize, width: usize) -> &[f32] {
        // SAFETY: attention was written before the last barrier; nothing writes it before the next one.
        unsafe { self.buffers.row(Buffer::Attention, row, 0..width) }
    }
}

fn grow(floats: &mut Vec<f32>, len: usize) {
    if floats.len() < len {
        floats.resize(len, 0.0);
    }
}
