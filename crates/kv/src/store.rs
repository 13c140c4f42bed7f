//! Where page bytes live: the trait that host and device stores implement, and a store over plain vectors.

use crate::geometry::KvGeometry;

/// What a store may refuse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// No memory for a growth.
    #[error("no memory for {pages} KV pages of {page_bytes} bytes: {reason}")]
    OutOfMemory {
        /// Pages asked for, in all.
        pages: usize,
        /// Bytes of a page.
        page_bytes: usize,
        /// What the memory's owner said.
        reason: String,
    },
    /// A page or a byte that the store doesn't have.
    #[error("bytes {offset} to {end} of KV page {page}: the store has {capacity} pages of {page_bytes} bytes")]
    OutOfRange {
        /// The page.
        page: u32,
        /// First byte in the page.
        offset: usize,
        /// One past the last byte in the page.
        end: usize,
        /// Pages of the store.
        capacity: usize,
        /// Bytes of a page.
        page_bytes: usize,
    },
    /// The memory's owner failed.
    #[error("KV store: {what}")]
    Failed {
        /// What failed.
        what: String,
    },
}

/// A copy of a whole page. Copies are done in the order in which they were asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageCopy {
    /// Page to read.
    pub from: u32,
    /// Page to overwrite.
    pub to: u32,
}

/// Memory of pages `0 .. capacity_pages()`. A call that fails has changed nothing.
pub trait KvPageStore {
    /// Sizes of its pages.
    fn geometry(&self) -> KvGeometry;

    /// Pages that have memory now.
    fn capacity_pages(&self) -> usize;

    /// Gives memory to at least `pages` pages. A store should map more and move no byte; it returns the bytes of
    /// earlier pages that it did move. Nothing happens if it has that many. New pages hold no particular bytes.
    ///
    /// # Errors
    /// [`StoreError::OutOfMemory`], [`StoreError::Failed`].
    fn grow_to(&mut self, pages: usize) -> Result<u64, StoreError>;

    /// Gives back the memory of pages from `pages` on, after all that could touch it is done. It may keep what shares
    /// a granule with earlier pages. Nothing happens if it has fewer.
    ///
    /// # Errors
    /// [`StoreError::Failed`].
    fn shrink_to(&mut self, pages: usize) -> Result<(), StoreError>;

    /// Copies a whole page; on a device in order with the steps.
    ///
    /// # Errors
    /// [`StoreError::OutOfRange`], [`StoreError::Failed`].
    fn copy_page(&mut self, copy: PageCopy) -> Result<(), StoreError>;

    /// Reads `into.len()` bytes at `offset` of a page. For tests and tools, never in a step.
    ///
    /// # Errors
    /// [`StoreError::OutOfRange`], [`StoreError::Failed`].
    fn read(&self, page: u32, offset: usize, into: &mut [u8]) -> Result<(), StoreError>;

    /// Writes bytes at `offset` of a page. For tests and tools, never in a step.
    ///
    /// # Errors
    /// [`StoreError::OutOfRange`], [`StoreError::Failed`].
    fn write(&mut self, page: u32, offset: usize, bytes: &[u8]) -> Result<(), StoreError>;
}

/// A store over plain vectors, one for each page, so that growth leaves earlier pages where they are.
#[derive(Debug)]
pub struct VecStore {
    geometry: KvGeometry,
    pages: Vec<Box<[u8]>>,
}

impl VecStore {
    /// What a new page holds: a pattern that reads as NaN in every KV type, so that a read before a write shows.
    pub const POISON: u8 = 0xff;

    /// A store of no pages.
    pub fn new(geometry: KvGeometry) -> Self {
        VecStore { geometry, pages: Vec::new() }
    }

    /// Address of a page's first byte, or `None` beyond the capacity. To see that growth moves nothing.
    pub fn address(&self, page: u32) -> Option<usize> {
        self.pages.get(page as usize).map(|p| p.as_ptr() as usize)
    }

    fn out_of_range(&self, page: u32, offset: usize, len: usize) -> StoreError {
        StoreError::OutOfRange {
            page,
            offset,
            end: offset.saturating_add(len),
            capacity: self.pages.len(),
            page_bytes: self.geometry.page_bytes(),
        }
    }
}

impl KvPageStore for VecStore {
    fn geometry(&self) -> KvGeometry {
        self.geometry
    }

    fn capacity_pages(&self) -> usize {
        self.pages.len()
    }

    fn grow_to(&mut self, pages: usize) -> Result<u64, StoreError> {
        let page_bytes = self.geometry.page_bytes();
        let refuse =
            |e: std::collections::TryReserveError| StoreError::OutOfMemory { pages, page_bytes, reason: e.to_string() };
        let before: Vec<_> = self.pages.iter().map(|p| p.as_ptr()).collect();
        let mut more = Vec::new();
        more.try_reserve_exact(pages.saturating_sub(before.len())).map_err(refuse)?;
        for _ in before.len()..pages {
            let mut page = Vec::new();
            page.try_reserve_exact(page_bytes).map_err(refuse)?;
            page.resize(page_bytes, Self::POISON);
            more.push(page.into_boxed_slice());
        }
        self.pages.try_reserve(more.len()).map_err(refuse)?;
        self.pages.append(&mut more);
        let moved = self.pages.iter().zip(before).filter(|(page, was)| page.as_ptr() != *was).count();
        Ok((moved * page_bytes) as u64)
    }

    fn shrink_to(&mut self, pages: usize) -> Result<(), StoreError> {
        self.pages.truncate(pages);
        Ok(())
    }

    fn copy_page(&mut self, PageCopy { from, to }: PageCopy) -> Result<(), StoreError> {
        let len = self.geometry.page_bytes();
        let (from_at, to_at) = (from as usize, to as usize);
        for page in [from, to] {
            if page as usize >= self.pages.len() {
                return Err(self.out_of_range(page, 0, len));
            }
        }
        if from_at != to_at {
            let (low, high) = self.pages.split_at_mut(from_at.max(to_at));
            match from_at < to_at {
                true => high[0].copy_from_slice(&low[from_at]),
                false => low[to_at].copy_from_slice(&high[0]),
            }
        }
        Ok(())
    }

    fn read(&self, page: u32, offset: usize, into: &mut [u8]) -> Result<(), StoreError> {
        let end = offset.saturating_add(into.len());
        let bytes = self.pages.get(page as usize).and_then(|p| p.get(offset..end));
        into.copy_from_slice(bytes.ok_or_else(|| self.out_of_range(page, offset, end - offset))?);
        Ok(())
    }

    fn write(&mut self, page: u32, offset: usize, bytes: &[u8]) -> Result<(), StoreError> {
        let end = offset.saturating_add(bytes.len());
        match self.pages.get_mut(page as usize).and_then(|p| p.get_mut(offset..end)) {
            Some(into) => into.copy_from_slice(bytes),
            None => return Err(self.out_of_range(page, offset, bytes.len())),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use headrace_numerics::elementwise::KvDtype;

    use super::*;
    use crate::KvLayout;

    fn store(pages: usize) -> VecStore {
        let geometry = KvGeometry {
            layers: 1,
            kv_heads: 1,
            head_dim: 2,
            dtype: KvDtype::F16,
            layout: KvLayout::HeadMajor,
            page_tokens: 32,
        };
        let mut store = VecStore::new(geometry);
        assert_eq!(store.grow_to(pages), Ok(0));
        store
    }

    #[test]
    fn growth_keeps_addresses_and_bytes() {
        let mut store = store(3);
        store.write(1, 7, &[1, 2, 3]).unwrap();
        let before: Vec<_> = (0..3).map(|p| store.address(p)).collect();
        for pages in [4, 5, 64, 1000] {
            assert_eq!(store.grow_to(pages), Ok(0));
            assert_eq!(store.capacity_pages(), pages);
            assert_eq!(before, (0..3).map(|p| store.address(p)).collect::<Vec<_>>());
        }
        let mut bytes = [0; 5];
        store.read(1, 6, &mut bytes).unwrap();
        assert_eq!(bytes, [0xff, 1, 2, 3, 0xff]);
        store.shrink_to(2).unwrap();
        assert_eq!(store.capacity_pages(), 2);
    }

    #[test]
    fn copies_go_both_ways() {
        let mut store = store(4);
        store.write(0, 0, &[5; 256]).unwrap();
        store.copy_page(PageCopy { from: 0, to: 3 }).unwrap();
        store.write(3, 255, &[6]).unwrap();
        store.copy_page(PageCopy { from: 3, to: 1 }).unwrap();
        store.copy_page(PageCopy { from: 1, to: 1 }).unwrap();
        let mut bytes = [0; 2];
        store.read(1, 254, &mut bytes).unwrap();
        assert_eq!(bytes, [5, 6]);
    }

    #[test]
    fn what_is_not_there_is_refused() {
        let mut store = store(2);
        assert!(matches!(store.copy_page(PageCopy { from: 0, to: 2 }), Err(StoreError::OutOfRange { page: 2, .. })));
        assert!(matches!(store.copy_page(PageCopy { from: 9, to: 0 }), Err(StoreError::OutOfRange { page: 9, .. })));
        assert!(matches!(store.read(1, 250, &mut [0; 7]), Err(StoreError::OutOfRange { end: 257, .. })));
        assert!(matches!(store.write(1, usize::MAX, &[0; 7]), Err(StoreError::OutOfRange { .. })));
        assert!(matches!(store.grow_to(usize::MAX), Err(StoreError::OutOfMemory { .. })));
        assert_eq!(store.capacity_pages(), 2);
    }
}
