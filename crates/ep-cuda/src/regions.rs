//! Which bytes of a range belong to which program: regions side by side, taken again once they are given back.

/// Alignment of a region.
const ALIGN: u64 = 256;

/// Regions of one range. The range grows with them and never shrinks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Regions {
    end: u64,
    /// Regions given back: offset and bytes.
    free: Vec<(u64, u64)>,
}

impl Regions {
    /// Bytes that `count` regions of `bytes` bytes take.
    pub fn bytes_of(bytes: u64, count: u64) -> u64 {
        bytes.next_multiple_of(ALIGN).saturating_mul(count)
    }

    /// Bytes that have to be mapped.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Offset of a region of `bytes` bytes: one of that size that was given back, or a new one at the end.
    pub fn take(&mut self, bytes: u64) -> u64 {
        let bytes = bytes.next_multiple_of(ALIGN);
        if let Some(at) = self.free.iter().position(|&(_, size)| size == bytes) {
            return self.free.swap_remove(at).0;
        }
        self.end += bytes;
        self.end - bytes
    }

    /// Gives a region back that was taken.
    pub fn give(&mut self, offset: u64, bytes: u64) {
        self.free.push((offset, bytes.next_multiple_of(ALIGN)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_lie_side_by_side_and_are_taken_again() {
        let mut regions = Regions::default();
        let taken = [regions.take(1), regions.take(256), regions.take(257)];
        assert_eq!((taken, regions.end()), ([0, 256, 512], 1024));
        regions.give(256, 256);
        regions.give(512, 257);
        // By size, whatever was given back first; and nothing twice.
        assert_eq!((regions.take(300), regions.take(10), regions.take(10)), (512, 256, 1024));
        assert_eq!(regions.end(), 1280);
        assert_eq!(Regions::bytes_of(257, 3), 1536);
    }
}
