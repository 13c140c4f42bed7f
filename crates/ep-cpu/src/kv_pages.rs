//! Keys and values in the pages of the KV range: one position stored, a run of positions loaded as floats.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

use half::f16;
use headrace_kv::geometry::{KvGeometry, KvHalf};
use headrace_numerics::elementwise::KvDtype;

use crate::kernels::convert::{from_f16, to_f16};
use crate::memory::Region;
use crate::simd::SimdLevel;

/// The keys or the values of one head of one layer in one page.
#[derive(Clone, Copy, Debug)]
pub struct Entries {
    /// Page.
    pub page: u32,
    /// Layer.
    pub layer: usize,
    /// Keys or values.
    pub half: KvHalf,
    /// Key-value head.
    pub head: usize,
}

/// The mapped pages, shared by the workers of a step.
pub struct KvPages<'a> {
    base: NonNull<u8>,
    pages: usize,
    geometry: KvGeometry,
    region: PhantomData<&'a mut Region>,
}

// SAFETY: access to the pages is unsafe, and its callers say why no two workers collide.
unsafe impl Send for KvPages<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for KvPages<'_> {}

impl<'a> KvPages<'a> {
    /// The whole pages that `region` backs.
    pub fn new(region: &'a mut Region, geometry: KvGeometry) -> KvPages<'a> {
        let pages = region.mapped() / geometry.page_bytes().max(1);
        KvPages { base: region.base(), pages, geometry, region: PhantomData }
    }

    /// Number of pages.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Geometry of a page.
    pub fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    fn at(&self, entries: Entries, token: usize) -> *mut u8 {
        let Entries { page, layer, half, head } = entries;
        let g = &self.geometry;
        let inside = layer < g.layers && head < g.kv_heads && token < g.page_tokens;
        assert!((page as usize) < self.pages && inside, "page {page}, layer {layer}, head {head}, token {token}");
        // SAFETY: the page is mapped and the offset lies within a page.
        unsafe { self.base.as_ptr().add(page as usize * g.page_bytes() + g.offset(layer, half, head, token)) }
    }

    /// Rounds and stores one key or value, `head_dim` floats.
    ///
    /// # Safety
    /// No other worker reads or writes this entry before the next barrier.
    pub unsafe fn store(&self, entries: Entries, token: usize, x: &[f32]) {
        let dim = self.geometry.head_dim;
        assert_eq!(x.len(), dim);
        let at = self.at(entries, token);
        // SAFETY: an entry is `head_dim` elements of the page's type, aligned because pages, rows and elements are
        // multiples of the element's size from a page-aligned base; it is this worker's alone by the caller's promise.
        unsafe {
            match self.geometry.dtype {
                KvDtype::F16 => to_f16(x, std::slice::from_raw_parts_mut(at.cast::<f16>(), dim)),
                KvDtype::F32 => std::slice::from_raw_parts_mut(at.cast::<f32>(), dim).copy_from_slice(x),
            }
        }
    }

    /// Loads positions `tokens` of a page into `out`, position `t` at row `t - tokens.start` of `stride` floats; the
    /// floats of a row behind `head_dim` are left alone.
    ///
    /// # Safety
    /// No worker writes these entries before the next barrier, unless it is this one.
    pub unsafe fn load(
        &self,
        level: SimdLevel,
        entries: Entries,
        tokens: Range<usize>,
        stride: usize,
        out: &mut [f32],
    ) {
        let g = &self.geometry;
        if tokens.is_empty() {
            return;
        }
        let first = self.at(entries, tokens.start);
        let _last = self.at(entries, tokens.end - 1);
        let contiguous = g.token_stride() == g.head_dim * g.dtype.bytes() && stride == g.head_dim;
        let (runs, len) = if contiguous { (1, tokens.len() * g.head_dim) } else { (tokens.len(), g.head_dim) };
        for (i, row) in out.chunks_mut(if contiguous { len } else { stride }).take(runs).enumerate() {
            // SAFETY: rows `tokens` lie within the page, `token_stride` apart; aligned as in `store`; not written
            // meanwhile, by the caller's promise.
            unsafe {
                let at = first.add(i * g.token_stride());
                match g.dtype {
                    KvDtype::F16 => from_f16(level, std::slice::from_raw_parts(at.cast::<f16>(), len), &mut row[..len]),
                    KvDtype::F32 => row[..len].copy_from_slice(std::slice::from_raw_parts(at.cast::<f32>(), len)),
                }
            }
        }
    }
}
