//! Parts of a device region laid out one after the other, each aligned as a plane is. No device.

use headrace_provider::program::PLANE_ALIGN;

/// Hands out offsets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    next: u64,
}

impl Cursor {
    /// The offset of a part of `bytes` bytes: a multiple of [`PLANE_ALIGN`]. Saturates, so that what can't be counted can't
    /// be mapped either.
    pub fn take(&mut self, bytes: u64) -> u64 {
        let at = self.next;
        self.next = at.saturating_add(bytes).div_ceil(PLANE_ALIGN as u64).saturating_mul(PLANE_ALIGN as u64);
        at
    }

    /// Bytes handed out.
    pub fn bytes(&self) -> u64 {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_aligned_and_apart() {
        let mut cursor = Cursor::default();
        let parts: Vec<(u64, u64)> = [1, 0, 256, 257, 5].map(|n| (cursor.take(n), n)).to_vec();
        assert_eq!(parts.iter().map(|p| p.0).collect::<Vec<_>>(), [0, 256, 256, 512, 1024]);
        assert!(parts.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0));
        assert_eq!(cursor.bytes(), 1280);
        cursor.take(u64::MAX);
        assert!(cursor.bytes() > u64::MAX - 512);
    }
}
