//! The float buffers of one step in the workspace range, shared by the workers.
//!
//! Every access is unsafe for the same reason and by the same discipline: between two barriers a float is either
//! written by one worker and read by no other, or written by none. `exec` splits the work so.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

use headrace_model::spec::DecoderConfig;
use headrace_provider::{Buffer, StepProgram};

use crate::linear::Sink;
use crate::memory::Region;

#[derive(Clone, Copy)]
struct Shape {
    base: NonNull<f32>,
    rows: usize,
    width: usize,
}

/// The buffers of a step with a certain number of rows.
pub struct StepBuffers<'a> {
    shapes: [Shape; 5],
    sinks: [Sink<'a>; 5],
    region: PhantomData<&'a mut Region>,
}

// SAFETY: access to the floats is unsafe, and its callers keep the discipline that the module states.
unsafe impl Send for StepBuffers<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for StepBuffers<'_> {}

fn index(buffer: Buffer) -> usize {
    match buffer {
        Buffer::Residual => 0,
        Buffer::Qkv => 1,
        Buffer::Attention => 2,
        Buffer::GateUp => 3,
        Buffer::Logits => 4,
    }
}

impl<'a> StepBuffers<'a> {
    /// The buffers of `program` in `region`, for `rows` rows of which `wanted` have logits. `None` if the region backs
    /// too few bytes or the rows are more than the program's.
    pub fn new(
        region: &'a mut Region,
        program: &StepProgram,
        config: &DecoderConfig,
        rows: usize,
        wanted: usize,
    ) -> Option<StepBuffers<'a>> {
        let fits = program.workspace_bytes(config) <= region.mapped() as u64;
        if !fits || rows > program.max_rows || wanted > program.max_wanted {
            return None;
        }
        let shapes = Buffer::ALL.map(|b| {
            let rows = if b == Buffer::Logits { wanted } else { rows };
            // SAFETY: the offset lies within the mapped bytes, as checked above.
            let base = unsafe { region.base().add(program.buffer_offset(config, b) as usize) };
            Shape { base: base.cast(), rows, width: b.width(config) }
        });
        let sinks = shapes.map(|s| {
            // SAFETY: the buffers lie one after the other in memory that `region`, borrowed mutably, owns; mapped
            // bytes are initialised (zero at first) and every bit pattern is a float. Rows are read and written through the same
            // base, never through a reference to the whole, which would have to be the only way to it.
            unsafe { Sink::from_raw(s.base, s.rows, s.width, s.width) }
        });
        Some(StepBuffers { shapes, sinks, region: PhantomData })
    }

    /// Floats of a row.
    pub fn width(&self, buffer: Buffer) -> usize {
        self.shapes[index(buffer)].width
    }

    /// Where linear layers write.
    pub fn sink(&self, buffer: Buffer) -> Sink<'a> {
        self.sinks[index(buffer)]
    }

    fn at(&self, buffer: Buffer, row: usize, cols: &Range<usize>) -> *mut f32 {
        let s = self.shapes[index(buffer)];
        assert!(
            row < s.rows && cols.start <= cols.end && cols.end <= s.width,
            "{buffer:?} row {row}, columns {cols:?}"
        );
        // SAFETY: row and columns lie within the buffer.
        unsafe { s.base.as_ptr().add(row * s.width + cols.start) }
    }

    /// Columns of a row, to read.
    ///
    /// # Safety
    /// No worker writes them before the next barrier.
    pub unsafe fn row(&self, buffer: Buffer, row: usize, cols: Range<usize>) -> &[f32] {
        let at = self.at(buffer, row, &cols);
        // SAFETY: in bounds by `at`; not written meanwhile, by the caller's promise.
        unsafe { std::slice::from_raw_parts(at, cols.len()) }
    }

    /// Columns of a row, to write.
    ///
    /// # Safety
    /// No other worker reads or writes them before the next barrier, and the caller holds no other slice of them.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn row_mut(&self, buffer: Buffer, row: usize, cols: Range<usize>) -> &mut [f32] {
        let at = self.at(buffer, row, &cols);
        // SAFETY: in bounds by `at`; this worker's alone, by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(at, cols.len()) }
    }

    /// All rows of a buffer, to read.
    ///
    /// # Safety
    /// No worker writes any of them before the next barrier.
    pub unsafe fn all(&self, buffer: Buffer) -> &[f32] {
        let s = self.shapes[index(buffer)];
        // SAFETY: the buffer is `rows * width` floats; not written meanwhile, by the caller's promise.
        unsafe { std::slice::from_raw_parts(s.base.as_ptr(), s.rows * s.width) }
    }
}
