//! The float buffers of a step: their shapes, and where they lie in the workspace range.

use headrace_model::spec::DecoderConfig;

use crate::program::{Buffer, PLANE_ALIGN, StepProgram};

impl Buffer {
    /// Every buffer, in the order in which they lie in the workspace range.
    pub const ALL: [Buffer; 5] = [Buffer::Residual, Buffer::Qkv, Buffer::Attention, Buffer::GateUp, Buffer::Logits];

    /// Floats of one row. Saturates instead of overflowing.
    pub const fn width(self, config: &DecoderConfig) -> usize {
        match self {
            Buffer::Residual => config.hidden,
            Buffer::Qkv => {
                config.kv_heads.saturating_mul(2).saturating_add(config.heads).saturating_mul(config.head_dim)
            }
            Buffer::Attention => config.heads.saturating_mul(config.head_dim),
            Buffer::GateUp => config.ffn.saturating_mul(2),
            Buffer::Logits => config.vocab,
        }
    }
}

impl StepProgram {
    /// Most rows that `buffer` holds.
    pub const fn buffer_rows(&self, buffer: Buffer) -> usize {
        match buffer {
            Buffer::Logits => self.max_wanted,
            _ => self.max_rows,
        }
    }

    /// Byte offset of `buffer` in the workspace range, a multiple of [`PLANE_ALIGN`].
    pub fn buffer_offset(&self, config: &DecoderConfig, buffer: Buffer) -> u64 {
        let before = Buffer::ALL.into_iter().take_while(|&b| b != buffer);
        before.map(|b| self.buffer_bytes(config, b)).fold(0, u64::saturating_add)
    }

    /// Bytes of the workspace range that the buffers of this program take: what must be mapped before it is recorded.
    pub fn workspace_bytes(&self, config: &DecoderConfig) -> u64 {
        Buffer::ALL.into_iter().map(|b| self.buffer_bytes(config, b)).fold(0, u64::saturating_add)
    }

    fn buffer_bytes(&self, config: &DecoderConfig, buffer: Buffer) -> u64 {
        let floats = (self.buffer_rows(buffer) as u64).saturating_mul(buffer.width(config) as u64);
        floats.saturating_mul(4).div_ceil(PLANE_ALIGN as u64).saturating_mul(PLANE_ALIGN as u64)
    }
}
