//! Where an entry lies in a page: the two layouts, offsets, strides, bytes.

use headrace_numerics::attention::CHUNK;
use headrace_numerics::elementwise::KvDtype;

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
}
