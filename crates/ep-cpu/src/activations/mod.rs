//! A batch of quantised activation rows, in the layout that the linear kernels read.
//!
//! Eight blocks of 32 form a group, one block a lane, as the contract's eight lanes want it. The 32 codes of a block
//! are reordered (each half of 16: its even elements, then its odd ones, so that both ways of packing nibbles unpack
//! without a shuffle) and cut in eight dwords of four codes; dword `w` of lane `l` lies at byte `32 w + 4 l` of the
//! group. A vector register then holds the same dword of eight blocks, and an integer dot product leaves the dots of
//! eight blocks in eight lanes. Integer sums are exact, so neither order changes a bit.
//!
//! Where the last group of a row has four blocks at most, the row ends with a copy of it in which the blocks repeat (see
//! `shared_lanes`), so that the last groups of several weight rows can share a register.

#[cfg(target_arch = "x86_64")]
#[allow(clippy::needless_range_loop)] // Indices name lanes across several arrays at once.
mod avx512;

use std::marker::PhantomData;

use headrace_numerics::activation::{ActivationWidth, amax};
use headrace_numerics::format::BLOCK;

#[cfg(target_arch = "x86_64")]
use crate::linear::avx2;
use crate::linear::panel::{self, Natural};
use crate::simd::SimdLevel;

/// Blocks of a group.
pub const GROUP_BLOCKS: usize = 8;

/// Codes of a group.
pub const GROUP_CODES: usize = GROUP_BLOCKS * BLOCK;

/// One plane of a group: signed bytes, kept as their two's complement.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct CodeGroup(pub(crate) [u8; GROUP_CODES]);

/// Step sizes and code sums of a group, one lane a block. Lanes past the last block are zero.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(crate) struct StepGroup {
    /// Step size of each block.
    pub(crate) d: [f32; GROUP_BLOCKS],
    /// Sum of the 32 codes of each block.
    pub(crate) sum: [i32; GROUP_BLOCKS],
    /// Sum of the first 16 codes of each block.
    pub(crate) first: [i32; GROUP_BLOCKS],
}

const ZERO_CODES: CodeGroup = CodeGroup([0; GROUP_CODES]);
const ZERO_STEPS: StepGroup = StepGroup { d: [0.0; GROUP_BLOCKS], sum: [0; GROUP_BLOCKS], first: [0; GROUP_BLOCKS] };

/// Byte of element `i` (0 to 31) of the block in lane `lane` within its group.
pub(crate) const fn code_at(lane: usize, i: usize) -> usize {
    let (half, r) = (i / 16, i % 16);
    let p = 16 * half + 8 * (r % 2) + r / 2;
    (p / 4) * 32 + lane * 4 + p % 4
}

/// Element at position `p` (0 to 31) of a reordered block: the inverse of the order in [`code_at`].
pub(crate) const fn element_at(p: usize) -> usize {
    16 * (p / 16) + 2 * (p % 8) + p % 16 / 8
}

/// Lanes that a row's last group takes where several weight rows share one: 2 for one or two blocks, 4 for three or
/// four; 0 where the last group is full or has more blocks, and nothing is shared.
pub(crate) const fn shared_lanes(cols: usize) -> usize {
    match cols.div_ceil(BLOCK) % GROUP_BLOCKS {
        1 | 2 => 2,
        3 | 4 => 4,
        _ => 0,
    }
}

/// Groups that a row takes in the buffers.
const fn slots(cols: usize) -> usize {
    cols.div_ceil(GROUP_CODES) + (shared_lanes(cols) > 0) as usize
}

/// Fills every lane with the first `lanes` ones, over and over.
fn repeat_lanes<T: Copy>(lanes: usize, from: &[T; GROUP_BLOCKS], to: &mut [T; GROUP_BLOCKS]) {
    for (l, to) in to.iter_mut().enumerate() {
        *to = from[l & (lanes - 1)];
    }
}

fn repeat_codes(lanes: usize, from: &CodeGroup, to: &mut CodeGroup) {
    let (from, to) = (from.0.as_chunks::<4>().0, to.0.as_chunks_mut::<4>().0);
    for (from, to) in from.as_chunks::<GROUP_BLOCKS>().0.iter().zip(to.as_chunks_mut::<GROUP_BLOCKS>().0) {
        repeat_lanes(lanes, from, to);
    }
}

/// Quantised activation rows, `[rows, cols]`. The buffers are kept from step to step and only ever grow.
#[derive(Default)]
pub struct Activations {
    rows: usize,
    cols: usize,
    width: ActivationWidth,
    /// Low bytes of 16-bit codes, or the 8-bit codes: `[rows, slots]`.
    low: Vec<CodeGroup>,
    /// High bytes of 16-bit codes, `[rows, slots]`; not used for 8-bit codes.
    high: Vec<CodeGroup>,
    steps: Vec<StepGroup>,
}

impl Activations {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes room for `rows` rows of `cols` elements. What the rows hold is undefined until each has been quantised.
    /// Allocates only if a batch has never been this large before.
    pub fn prepare(&mut self, rows: usize, cols: usize, width: ActivationWidth) {
        (self.rows, self.cols, self.width) = (rows, cols, width);
        let need = rows * slots(cols);
        if self.low.len() < need {
            self.low.resize(need, ZERO_CODES);
            self.steps.resize(need, ZERO_STEPS);
        }
        if width == ActivationWidth::Int16 && self.high.len() < need {
            self.high.resize(need, ZERO_CODES);
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Width of the codes.
    pub fn width(&self) -> ActivationWidth {
        self.width
    }

    /// Groups of eight blocks in a row, the last one padded with zeros.
    #[inline(always)]
    pub(crate) fn groups(&self) -> usize {
        self.cols.div_ceil(GROUP_CODES)
    }

    /// Low bytes (or 8-bit codes), high bytes (empty for 8-bit codes) and steps of row `row`, `groups()` long.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> (&[CodeGroup], &[CodeGroup], &[StepGroup]) {
        let first = row * slots(self.cols);
        self.range(first..first + self.groups())
    }

    /// As [`Activations::row`], with the copy of the last group behind the groups if there is one.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(crate) fn row_and_shared(&self, row: usize) -> (&[CodeGroup], &[CodeGroup], &[StepGroup]) {
        self.range(row * slots(self.cols)..(row + 1) * slots(self.cols))
    }

    #[inline(always)]
    fn range(&self, range: std::ops::Range<usize>) -> (&[CodeGroup], &[CodeGroup], &[StepGroup]) {
        let high: &[CodeGroup] = match self.width {
            ActivationWidth::Int16 => &self.high[range.clone()],
            ActivationWidth::Int8 => &[],
        };
        (&self.low[range.clone()], high, &self.steps[range])
    }

    /// What row `row` holds, a block at a time and padded to whole groups: step size, codes in the order of the
    /// elements, sum of the codes, sum of the first 16. For tests and tools; kernels read the packed form.
    pub fn block_values(&self, row: usize) -> Vec<(f32, [i16; BLOCK], i32, i32)> {
        let (low, high, steps) = self.row(row);
        let block = |b: usize| {
            let (g, lane) = (b / GROUP_BLOCKS, b % GROUP_BLOCKS);
            let code = |i: usize| {
                let byte = |plane: &CodeGroup| i16::from(plane.0[code_at(lane, i)] as i8);
                high.get(g).map_or(0, |high| 256 * byte(high)) + byte(&low[g])
            };
            (steps[g].d[lane], std::array::from_fn(code), steps[g].sum[lane], steps[g].first[lane])
        };
        (0..self.groups() * GROUP_BLOCKS).map(block).collect()
    }

    /// Quantises `x` (`cols()` long) into row `row`.
    ///
    /// # Panics
    /// If `row` is out of range or `x` is not `cols()` long.
    pub fn quantise_row(&mut self, level: SimdLevel, row: usize, x: &[f32]) {
        // SAFETY: `&mut self` is held for the whole call, so no other writer or reader exists.
        unsafe { self.writer().quantise_row(level, row, x) }
    }

    /// A writer that several threads share to fill different rows at once.
    pub fn writer(&mut self) -> ActivationWriter<'_> {
        ActivationWriter {
            rows: self.rows,
            cols: self.cols,
            width: self.width,
            low: self.low.as_mut_ptr(),
            high: self.high.as_mut_ptr(),
            steps: self.steps.as_mut_ptr(),
            batch: PhantomData,
        }
    }
}

/// Fills rows of an [`Activations`]; copies of it may be used from several threads at once, on different rows.
#[derive(Clone, Copy)]
pub struct ActivationWriter<'a> {
    rows: usize,
    cols: usize,
    width: ActivationWidth,
    low: *mut CodeGroup,
    high: *mut CodeGroup,
    steps: *mut StepGroup,
    batch: PhantomData<&'a mut Activations>,
}

// SAFETY: the pointers lead to buffers that the writer borrows mutably for `'a`; `quantise_row`, the only access, is
// unsafe and demands that no two threads write one row at once.
unsafe impl Send for ActivationWriter<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for ActivationWriter<'_> {}

impl ActivationWriter<'_> {
    /// Quantises `x` (as many elements as the batch has columns) into row `row`.
    ///
    /// # Panics
    /// If `row` is out of range or `x` has another length.
    ///
    /// # Safety
    /// No other thread may write the same row at the same time.
    pub unsafe fn quantise_row(&self, level: SimdLevel, row: usize, x: &[f32]) {
        assert!(row < self.rows && x.len() == self.cols, "activation row {row} of {} elements", x.len());
        let slots = slots(self.cols);
        let wide = self.width == ActivationWidth::Int16;
        // SAFETY: `prepare` made every buffer at least `rows * slots` long (`high` for 16-bit codes only) and
        // `row < rows`; the borrow of the batch keeps them alive and unmoved; the caller keeps other threads off the
        // row, and different rows don't overlap.
        let (low, high, steps) = unsafe {
            (
                std::slice::from_raw_parts_mut(self.low.add(row * slots), slots),
                if wide { std::slice::from_raw_parts_mut(self.high.add(row * slots), slots) } else { &mut [] },
                std::slice::from_raw_parts_mut(self.steps.add(row * slots), slots),
            )
        };
        let groups = self.cols.div_ceil(GROUP_CODES);
        let wide_groups = groups.min(high.len());
        let (l, h, s) = (&mut low[..groups], &mut high[..wide_groups], &mut steps[..groups]);
        match level {
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512Vnni => {
                assert!(level.is_available(), "this processor lacks {level}");
                // SAFETY: the processor has the level; every buffer holds all groups of the row, `high` if it is needed.
                unsafe { avx512::quantise(x, self.width, l, h, s) }
            }
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => {
                assert!(level.is_available(), "this processor lacks {level}");
                // SAFETY: the processor has the level.
                unsafe { quantise_avx2(x, self.width, l, h, s) }
            }
            _ => quantise_scalar(x, self.width, l, h, s),
        }
        let lanes = shared_lanes(self.cols);
        if lanes > 0 {
            for plane in [low, high] {
                if let [.., last, shared] = plane {
                    repeat_codes(lanes, last, shared);
                }
            }
            if let [.., last, shared] = steps {
                repeat_lanes(lanes, &last.d, &mut shared.d);
                repeat_lanes(lanes, &last.sum, &mut shared.sum);
                repeat_lanes(lanes, &last.first, &mut shared.first);
            }
        }
    }
}

/// One row, in the terms of the contract; `interleave` brings the bytes of a group into the order of the activations.
#[inline(always)]
fn quantise_portable(
    x: &[f32],
    width: ActivationWidth,
    low: &mut [CodeGroup],
    high: &mut [CodeGroup],
    steps: &mut [StepGroup],
    interleave: impl Fn(&Natural, &mut CodeGroup),
) {
    for (g, chunk) in x.chunks(GROUP_CODES).enumerate() {
        let step = &mut steps[g];
        *step = ZERO_STEPS;
        let mut bytes: [Natural; 2] = [[0; GROUP_CODES]; 2];
        for (lane, block) in chunk.chunks(BLOCK).enumerate() {
            let amax = amax(block);
            let inv = width.max_code() / amax;
            if !amax.is_finite() {
                step.d[lane] = amax;
                continue;
            }
            if !inv.is_finite() {
                continue;
            }
            step.d[lane] = amax / width.max_code();
            let mut codes = [0i16; BLOCK];
            for (code, &v) in codes.iter_mut().zip(block) {
                *code = (v * inv).round_ties_even() as i16;
            }
            for (i, &code) in codes.iter().enumerate() {
                // `code` is `256 * hi + lo`; an 8-bit code is its own low byte.
                bytes[0][lane * BLOCK + i] = code as u8;
                bytes[1][lane * BLOCK + i] = ((i32::from(code) + 128) >> 8) as u8;
            }
            let sum = |codes: &[i16]| codes.iter().map(|&c| i32::from(c)).sum();
            step.sum[lane] = sum(&codes);
            step.first[lane] = sum(&codes[..BLOCK / 2]);
        }
        interleave(&bytes[0], &mut low[g]);
        if let Some(high) = high.get_mut(g) {
            interleave(&bytes[1], high);
        }
    }
}

/// [`quantise_portable`] for any processor.
fn quantise_scalar(
    x: &[f32],
    width: ActivationWidth,
    low: &mut [CodeGroup],
    high: &mut [CodeGroup],
    steps: &mut [StepGroup],
) {
    quantise_portable(x, width, low, high, steps, |from, to| panel::interleave(from, &mut to.0));
}

/// [`quantise_portable`] compiled for AVX2.
///
/// # Safety
/// The processor must have `SimdLevel::Avx2`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quantise_avx2(
    x: &[f32],
    width: ActivationWidth,
    low: &mut [CodeGroup],
    high: &mut [CodeGroup],
    steps: &mut [StepGroup],
) {
    quantise_portable(x, width, low, high, steps, |from, to| {
        // SAFETY: AVX2 is enabled here.
        unsafe { avx2::interleave(from, &mut to.0) }
    });
}
