//! The engine's KV: sequences and pages, grown and shrunk in place on the provider.

use headrace_kv::{Buckets, KvCache, KvGeometry, KvPageStore, PageCopy, SequenceId, StoreError};
use headrace_provider::{Provider, RangeKind};

use crate::error::Result;
use crate::stats::KvStats;

/// The pages of every sequence of an engine.
pub(crate) struct KvState {
    cache: KvCache,
    /// Totals at the last reset.
    growths_before: u64,
    moved_before: u64,
}

impl KvState {
    /// No page yet; room for `max_batch` sequences of `max_context` positions once it is grown that far.
    pub(crate) fn new(
        geometry: KvGeometry,
        max_context: usize,
        max_batch: usize,
        provider: &mut dyn Provider,
    ) -> Result<KvState> {
        let most = geometry.pages_for(max_context).saturating_mul(max_batch);
        let granule = provider.info().granule;
        let buckets = Buckets::new(1, most, geometry.page_bytes() as u64, granule)?;
        Ok(KvState { cache: KvCache::new(geometry, buckets)?, growths_before: 0, moved_before: 0 })
    }

    /// Admits a sequence of at most `max_length` positions.
    pub(crate) fn create(&mut self, max_length: usize) -> Result<SequenceId> {
        Ok(self.cache.create(max_length)?)
    }

    /// Gives the sequence pages for positions up to `length`, growing the capacity where it has to. A sequence that is
    /// longer, because a step failed, is cut back first.
    pub(crate) fn extend(
        &mut self,
        id: SequenceId,
        from: usize,
        length: usize,
        provider: &mut dyn Provider,
    ) -> Result<()> {
        if self.cache.length(id)? > from {
            self.cache.rewind(id, from)?;
        }
        let tokens = length - from;
        let needed = self.cache.pages_needed(&[(id, tokens)])?;
        if let Some(bucket) = self.cache.growth_for(needed)? {
            let mut store = ProviderStore { provider, geometry: self.cache.geometry() };
            self.cache.grow(&mut store, bucket.pages)?;
        }
        self.cache.append(id, tokens)?;
        Ok(())
    }

    /// Copies the sequence's page table into `table`, whose capacity is reused.
    pub(crate) fn page_table(&self, id: SequenceId, table: &mut Vec<u32>) -> Result<()> {
        table.clear();
        table.extend_from_slice(self.cache.page_table(id)?);
        Ok(())
    }

    /// Gives a sequence's pages back.
    pub(crate) fn free(&mut self, id: SequenceId) {
        // The one error is an unknown sequence, and then there is nothing to give back.
        let _ = self.cache.free(id);
    }

    pub(crate) fn stats(&self) -> KvStats {
        let s = self.cache.stats();
        let geometry = self.cache.geometry();
        KvStats {
            sequences: s.sequences as u64,
            tokens: s.tokens as u64,
            pages: s.used_pages as u64,
            bucket_pages: s.bucket.pages as u64,
            page_bytes: geometry.page_bytes() as u64,
            token_bytes: geometry.token_bytes() as u64,
            growth_events: s.growth_events - self.growths_before,
            growth_moved_bytes: s.growth_moved_bytes - self.moved_before,
        }
    }

    pub(crate) fn reset_stats(&mut self) {
        let s = self.cache.stats();
        (self.growths_before, self.moved_before) = (s.growth_events, s.growth_moved_bytes);
    }
}

/// The provider's KV range as a page store.
struct ProviderStore<'a> {
    provider: &'a mut dyn Provider,
    geometry: KvGeometry,
}

impl ProviderStore<'_> {
    fn at(&self, page: u32, offset: usize) -> u64 {
        u64::from(page) * self.geometry.page_bytes() as u64 + offset as u64
    }

    fn resize(&mut self, pages: usize) -> std::result::Result<(), StoreError> {
        let page_bytes = self.geometry.page_bytes();
        let bytes = pages as u64 * page_bytes as u64;
        self.provider.resize(RangeKind::Kv, bytes).map(drop).map_err(|e| StoreError::OutOfMemory {
            pages,
            page_bytes,
            reason: e.to_string(),
        })
    }
}

fn failed(error: impl ToString) -> StoreError {
    StoreError::Failed { what: error.to_string() }
}

impl KvPageStore for ProviderStore<'_> {
    fn geometry(&self) -> KvGeometry {
        self.geometry
    }

    fn capacity_pages(&self) -> usize {
        (self.provider.mapped(RangeKind::Kv) / self.geometry.page_bytes() as u64) as usize
    }

    fn grow_to(&mut self, pages: usize) -> std::result::Result<u64, StoreError> {
        if pages > self.capacity_pages() {
            self.resize(pages)?;
        }
        Ok(0)
    }

    fn shrink_to(&mut self, pages: usize) -> std::result::Result<(), StoreError> {
        if pages < self.capacity_pages() {
            self.resize(pages)?;
        }
        Ok(())
    }

    fn copy_page(&mut self, copy: PageCopy) -> std::result::Result<(), StoreError> {
        let (from, to) = (self.at(copy.from, 0), self.at(copy.to, 0));
        self.provider.copy_within(RangeKind::Kv, from, to, self.geometry.page_bytes() as u64).map_err(failed)
    }

    fn read(&self, page: u32, offset: usize, into: &mut [u8]) -> std::result::Result<(), StoreError> {
        self.provider.read(RangeKind::Kv, self.at(page, offset), into).map_err(failed)
    }

    fn write(&mut self, page: u32, offset: usize, bytes: &[u8]) -> std::result::Result<(), StoreError> {
        self.provider.write(RangeKind::Kv, self.at(page, offset), bytes).map_err(failed)
    }
}
