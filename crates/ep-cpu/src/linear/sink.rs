//! Where linear layers write: a strided float matrix that several threads fill at once, each its own columns.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

/// A float matrix `[rows, cols]` with a row stride, shared by the threads that fill it.
#[derive(Clone, Copy)]
pub struct Sink<'a> {
    data: *mut f32,
    rows: usize,
    cols: usize,
    stride: usize,
    buffer: PhantomData<&'a mut [f32]>,
}

// SAFETY: the pointer leads to a buffer that the sink borrows mutably for `'a`; it is read or written only through
// `Columns`, whose construction is unsafe and demands that no two of them overlap.
unsafe impl Send for Sink<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for Sink<'_> {}

impl<'a> Sink<'a> {
    /// A sink over the first `rows * stride` floats of `data` (the last row may end after `cols`).
    ///
    /// # Panics
    /// If `cols > stride` or `data` is too short.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(cols <= stride, "{cols} columns in rows of {stride} floats");
        assert!(rows == 0 || data.len() >= (rows - 1) * stride + cols, "a sink of {} floats is too short", data.len());
        Sink { data: data.as_mut_ptr(), rows, cols, stride, buffer: PhantomData }
    }

    /// As [`Sink::new`], of floats that others reach through the same pointer.
    ///
    /// # Panics
    /// If `cols > stride`.
    ///
    /// # Safety
    /// `data` is valid for reads and writes of `rows * stride` initialised floats for `'a`. While a [`Columns`] lives, nothing else
    /// reads or writes its elements, and no reference that is used later leads to them.
    pub unsafe fn from_raw(data: NonNull<f32>, rows: usize, cols: usize, stride: usize) -> Self {
        assert!(cols <= stride, "{cols} columns in rows of {stride} floats");
        Sink { data: data.as_ptr(), rows, cols, stride, buffer: PhantomData }
    }

    /// The columns `cols` of every row, for one caller.
    ///
    /// # Panics
    /// If the range is out of bounds.
    ///
    /// # Safety
    /// While the result lives, no other one may be used whose columns overlap these.
    pub unsafe fn columns(&self, cols: Range<usize>) -> Columns<'a> {
        assert!(cols.start <= cols.end && cols.end <= self.cols, "columns {cols:?} of {}", self.cols);
        // SAFETY: `cols.start <= self.cols`, so the address is within the buffer or one past its end.
        let data = unsafe { self.data.add(cols.start) };
        Columns { data, rows: self.rows, width: cols.len(), stride: self.stride, buffer: PhantomData }
    }
}

/// A run of columns of a [`Sink`] that one thread owns.
pub struct Columns<'a> {
    data: *mut f32,
    rows: usize,
    width: usize,
    stride: usize,
    buffer: PhantomData<&'a mut [f32]>,
}

// SAFETY: a `Columns` is the only access to its elements (the condition of `Sink::columns`), like a `&mut [f32]`.
unsafe impl Send for Columns<'_> {}

impl Columns<'_> {
    /// Number of rows.
    #[inline(always)]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    #[inline(always)]
    pub fn width(&self) -> usize {
        self.width
    }

    /// The columns' part of row `row`.
    ///
    /// # Panics
    /// If `row` is out of range.
    #[inline(always)]
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: rows and columns were checked against the buffer by `Sink::new` and `Sink::columns`; nobody else
        // uses these elements while `self` lives, and `&mut self` allows one slice at a time.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.stride), self.width) }
    }
}

/// What is added to the products, and in this order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Epilogue<'a> {
    /// One value a weight row of the view.
    pub bias: Option<&'a [f32]>,
    /// True to add what the output holds already (the residual).
    pub accumulate: bool,
}

impl Epilogue<'_> {
    /// Stores `y`, the product of weight row `i`, in `out`.
    #[inline(always)]
    pub(crate) fn store(&self, y: f32, i: usize, out: &mut f32) {
        let y = match self.bias {
            Some(bias) => y + bias[i],
            None => y,
        };
        *out = if self.accumulate { y + *out } else { y };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the executor does with a step's buffers, and what Miri accepts only where no reference to all of a buffer is made.
    #[test]
    fn columns_of_a_sink_and_rows_through_its_base_take_turns() {
        let (rows, width) = (3, 8);
        let mut floats = vec![0.0f32; rows * width];
        let base = NonNull::from(&mut floats[..]).cast::<f32>();
        // SAFETY: the floats are there for as long as `floats` is, which nothing else touches meanwhile.
        let sink = unsafe { Sink::from_raw(base, rows, width, width) };
        for turn in 1..4u8 {
            // SAFETY: these columns end before the next slice of the buffer is made.
            let mut columns = unsafe { sink.columns(2..4) };
            (0..rows).for_each(|row| columns.row_mut(row).iter_mut().for_each(|x| *x += f32::from(turn)));
            // SAFETY: within the buffer, and no columns are left.
            let row = unsafe { std::slice::from_raw_parts_mut(base.as_ptr().add(width), width) };
            row.iter_mut().for_each(|x| *x *= 2.0);
        }
        assert_eq!(floats[2..4], [6.0, 6.0]);
        assert_eq!(floats[width + 1..width + 4], [0.0, 22.0, 22.0]);
    }
}
