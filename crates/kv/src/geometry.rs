//! Where an entry lies in a page: the two layouts, offsets, strides, bytes.

use headrace_numerics::attention::CHUNK;
use headrace_numerics::elementwise::KvDtype;

use crate::error::KvError;

/// Order of the entries of one layer in a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvLayout {
    /// `[layer][K, V][head][token][head_dim]`.
    #[default]
    HeadMajor,
    /// `[layer][K, V][token][head][head_dim]`.
    SeqMajor,
}

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvHalf {
    /// Keys, after RoPE.
    Key,
    /// Values.
    Value,
}

/// Sizes of a page. A page holds all layers of [`KvGeometry::page_tokens`] consecutive positions of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvGeometry {
    /// Layers.
    pub layers: usize,
    /// Key and value heads of a layer.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Storage type.
    pub dtype: KvDtype,
    /// Order of entries.
    pub layout: KvLayout,
    /// Positions of a page; a multiple of the attention chunk, so that a chunk never spans two pages.
    pub page_tokens: usize,
}

impl KvGeometry {
    /// Positions of a page unless said otherwise: one attention chunk.
    pub const DEFAULT_PAGE_TOKENS: usize = CHUNK;

    /// Bytes of one position, all layers.
    pub const fn token_bytes(&self) -> usize {
        self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.bytes()
    }

    /// Bytes of a page.
    pub const fn page_bytes(&self) -> usize {
        self.page_tokens * self.token_bytes()
    }

    /// Pages that `tokens` positions need.
    pub const fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens)
    }

    /// Byte offset in a page of element 0 of `head` at position `token` of the page.
    pub const fn offset(&self, layer: usize, half: KvHalf, head: usize, token: usize) -> usize {
        let half = match half {
            KvHalf::Key => 0,
            KvHalf::Value => 1,
        };
        let row = match self.layout {
            KvLayout::HeadMajor => head * self.page_tokens + token,
            KvLayout::SeqMajor => token * self.kv_heads + head,
        };
        let rows_before = (layer * 2 + half) * self.kv_heads * self.page_tokens;
        (rows_before + row) * self.head_dim * self.dtype.bytes()
    }

    /// Bytes from one position of a head to the next.
    pub const fn token_stride(&self) -> usize {
        let rows = match self.layout {
            KvLayout::HeadMajor => 1,
            KvLayout::SeqMajor => self.kv_heads,
        };
        rows * self.head_dim * self.dtype.bytes()
    }

    /// Checks that a page of these sizes can exist: nothing is zero, a page holds whole attention chunks, and its
    /// bytes can be counted.
    ///
    /// # Errors
    /// [`KvError::Geometry`].
    pub fn validate(&self) -> Result<(), KvError> {
        let KvGeometry { layers, kv_heads, head_dim, page_tokens, .. } = *self;
        let refuse = |what: String| Err(KvError::Geometry { what });
        if [layers, kv_heads, head_dim, page_tokens].contains(&0) {
            return refuse(format!(
                "{layers} layers, {kv_heads} heads of {head_dim}, {page_tokens} tokens: none may be 0"
            ));
        }
        if !page_tokens.is_multiple_of(CHUNK) {
            return refuse(format!("{page_tokens} tokens a page; must be a multiple of {CHUNK}"));
        }
        let factors = [layers, kv_heads, head_dim, self.dtype.bytes(), page_tokens];
        match factors.iter().try_fold(2usize, |product, &n| product.checked_mul(n)) {
            Some(bytes) if isize::try_from(bytes).is_ok() => Ok(()),
            _ => refuse("a page has more bytes than can be addressed".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(layout: KvLayout, dtype: KvDtype) -> KvGeometry {
        KvGeometry { layers: 3, kv_heads: 2, head_dim: 5, dtype, layout, page_tokens: 64 }
    }

    /// Entries tile the page: none overlaps another, none lies outside, no byte is left over.
    #[test]
    fn entries_tile_the_page_in_both_layouts() {
        for layout in [KvLayout::HeadMajor, KvLayout::SeqMajor] {
            for dtype in [KvDtype::F16, KvDtype::F32] {
                let g = geometry(layout, dtype);
                let entry = g.head_dim * g.dtype.bytes();
                let mut offsets = Vec::new();
                for layer in 0..g.layers {
                    for half in [KvHalf::Key, KvHalf::Value] {
                        for head in 0..g.kv_heads {
                            let first = g.offset(layer, half, head, 0);
                            for token in 0..g.page_tokens {
                                let offset = g.offset(layer, half, head, token);
                                assert_eq!(offset, first + token * g.token_stride());
                                offsets.push(offset);
                            }
                        }
                    }
                }
                offsets.sort_unstable();
                let tiles: Vec<_> = (0..g.page_bytes()).step_by(entry).collect();
                assert_eq!(offsets, tiles, "{layout:?} {dtype:?}");
                assert_eq!(g.page_bytes(), g.page_tokens * g.token_bytes());
            }
        }
    }

    #[test]
    fn the_layouts_order_entries_as_named() {
        let (head, seq) = (geometry(KvLayout::HeadMajor, KvDtype::F16), geometry(KvLayout::SeqMajor, KvDtype::F16));
        let entry = 5 * 2;
        assert_eq!(head.offset(0, KvHalf::Key, 0, 1), entry);
        assert_eq!(head.offset(0, KvHalf::Key, 1, 0), 64 * entry);
        assert_eq!(seq.offset(0, KvHalf::Key, 1, 0), entry);
        assert_eq!(seq.offset(0, KvHalf::Key, 0, 1), 2 * entry);
        for g in [head, seq] {
            assert_eq!(g.offset(0, KvHalf::Value, 0, 0), 2 * 64 * entry);
            assert_eq!(g.offset(1, KvHalf::Key, 0, 0), 2 * 2 * 64 * entry);
        }
    }

    #[test]
    fn pages_are_counted_up() {
        let g = geometry(KvLayout::HeadMajor, KvDtype::F16);
        assert_eq!([0, 1, 63, 64, 65, 128, 129].map(|t| g.pages_for(t)), [0, 1, 1, 1, 2, 2, 3]);
    }

    #[test]
    fn impossible_pages_are_refused() {
        let good = geometry(KvLayout::HeadMajor, KvDtype::F16);
        assert_eq!(good.validate(), Ok(()));
        for bad in [
            KvGeometry { layers: 0, ..good },
            KvGeometry { kv_heads: 0, ..good },
            KvGeometry { head_dim: 0, ..good },
            KvGeometry { page_tokens: 0, ..good },
            KvGeometry { page_tokens: CHUNK + 1, ..good },
            KvGeometry { layers: usize::MAX, ..good },
            KvGeometry { layers: 1 << 30, kv_heads: 1 << 30, ..good },
        ] {
            assert!(matches!(bad.validate(), Err(KvError::Geometry { .. })), "{bad:?}");
        }
    }
}
