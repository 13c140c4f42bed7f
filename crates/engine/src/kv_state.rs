//! The engine's KV: sequences and pages, grown and shrunk in place on the provider.

use headrace_kv::{Buckets, KvCache, KvGeometry, KvPageStore, PageCopy, SequenceId, StoreError};
use headrace_provider::RangeKind;

use crate::error::Result;
use crate::home::Home;
use crate::stats::KvStats;

/// The pages of every sequence of an engine.
pub(crate) struct KvState {
    cache: KvCache,
    /// Most pages in use since the last time that no sequence was live, and in the busy spell before that.
    spell_pages: usize,
    spell_before: usize,
    /// Totals at the last reset.
    growths_before: u64,
    moved_before: u64,
}

impl KvState {
    /// No page yet; room for `max_batch` sequences of `max_context` positions once it is grown that far.
    pub(crate) fn new(geometry: KvGeometry, max_context: usize, max_batch: usize, home: &Home) -> Result<KvState> {
        let buckets = home.buckets(geometry, max_context, max_batch)?;
        Ok(KvState {
            cache: KvCache::new(geometry, buckets)?,
            spell_pages: 0,
            spell_before: 0,
            growths_before: 0,
            moved_before: 0,
        })
    }

    /// Sizes of a page.
    pub(crate) fn geometry(&self) -> KvGeometry {
        self.cache.geometry()
    }

    /// True if [`KvState::create`] would admit a sequence of at most `max_length` positions.
    pub(crate) fn admits(&self, max_length: usize) -> bool {
        self.cache.admits(max_length)
    }

    /// Pages of the largest capacity.
    pub(crate) fn max_pages(&self) -> usize {
        self.cache.buckets().max().pages
    }

    /// Admits a sequence of at most `max_length` positions.
    pub(crate) fn create(&mut self, max_length: usize) -> Result<SequenceId> {
        Ok(self.cache.create(max_length)?)
    }

    /// Gives the sequence pages for positions up to `length`, growing the capacity where it has to. A sequence that is
    /// longer, because a step failed, is cut back first.
    pub(crate) fn extend(&mut self, id: SequenceId, from: usize, length: usize, home: &mut Home) -> Result<()> {
        if self.cache.length(id)? > from {
            self.cache.rewind(id, from)?;
        }
        let tokens = length - from;
        let needed = self.cache.pages_needed(&[(id, tokens)])?;
        if let Some(bucket) = self.cache.growth_for(needed)? {
            let mut store = HomeStore { home, geometry: self.cache.geometry() };
            self.cache.grow(&mut store, bucket.pages)?;
        }
        self.cache.append(id, tokens)?;
        self.spell_pages = self.spell_pages.max(self.cache.stats().used_pages);
        Ok(())
    }

    /// As [`KvState::extend`], but with the capacity that is there: false if it would have to grow.
    pub(crate) fn extend_within(&mut self, id: SequenceId, from: usize, length: usize) -> Result<bool> {
        if self.cache.length(id)? > from {
            self.cache.rewind(id, from)?;
        }
        let needed = self.cache.pages_needed(&[(id, length - from)])?;
        if self.cache.growth_for(needed)?.is_some() {
            return Ok(false);
        }
        self.cache.append(id, length - from)?;
        self.spell_pages = self.spell_pages.max(self.cache.stats().used_pages);
        Ok(true)
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

    /// Pages that the capacity may come down to: when no sequence is live and the last two busy spells both needed half of it
    /// or less, so that a single short generation between long ones changes no epoch.
    pub(crate) fn surplus(&mut self) -> Option<usize> {
        if self.cache.stats().sequences > 0 {
            return None;
        }
        let spell = std::mem::take(&mut self.spell_pages);
        let needed = spell.max(std::mem::replace(&mut self.spell_before, spell));
        let target = self.cache.shrink_for(needed.max(1));
        (target.pages * 2 <= self.cache.bucket().pages).then_some(target.pages)
    }

    /// Gives back whatever live sequences don't hold.
    ///
    /// # Errors
    /// As [`KvState::shrink_to`].
    pub(crate) fn shrink_to_used(&mut self, home: &mut Home) -> Result<()> {
        let target = self.cache.shrink_for(self.cache.stats().used_pages.max(1));
        match target.pages < self.cache.bucket().pages {
            true => self.shrink_to(target.pages, home),
            false => Ok(()),
        }
    }

    /// Gives back everything beyond `pages` pages.
    ///
    /// # Errors
    /// The device's; the capacity is as before then.
    pub(crate) fn shrink_to(&mut self, pages: usize, home: &mut Home) -> Result<()> {
        let mut store = HomeStore { home, geometry: self.cache.geometry() };
        self.cache.shrink(&mut store, pages)?;
        Ok(())
    }

    /// Changes the largest capacity.
    ///
    /// # Errors
    /// If live sequences were promised more; nothing has changed then.
    pub(crate) fn set_buckets(&mut self, buckets: Buckets) -> Result<()> {
        Ok(self.cache.set_buckets(buckets)?)
    }

    pub(crate) fn stats(&self) -> KvStats {
        let s = self.cache.stats();
        let geometry = self.cache.geometry();
        KvStats {
            sequences: s.sequences as u64,
            tokens: s.tokens as u64,
            pages: s.used_pages as u64,
            bucket_pages: s.bucket.pages as u64,
            max_pages: s.limit_pages as u64,
            promised_pages: s.promised_pages as u64,
            largest_batch: 0,
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

/// The KV range of the model's home as a page store.
struct HomeStore<'a> {
    home: &'a mut Home,
    geometry: KvGeometry,
}

impl HomeStore<'_> {
    fn at(&self, page: u32, offset: usize) -> u64 {
        u64::from(page) * self.geometry.page_bytes() as u64 + offset as u64
    }

    fn bytes(&self, pages: usize) -> u64 {
        pages as u64 * self.geometry.page_bytes() as u64
    }
}

fn failed(error: impl ToString) -> StoreError {
    StoreError::Failed { what: error.to_string() }
}

impl KvPageStore for HomeStore<'_> {
    fn geometry(&self) -> KvGeometry {
        self.geometry
    }

    fn capacity_pages(&self) -> usize {
        (self.home.kv_mapped() / self.geometry.page_bytes() as u64) as usize
    }

    fn grow_to(&mut self, pages: usize) -> std::result::Result<u64, StoreError> {
        if pages > self.capacity_pages() {
            self.home.grow_kv(self.bytes(pages)).map_err(|e| StoreError::OutOfMemory {
                pages,
                page_bytes: self.geometry.page_bytes(),
                reason: e.to_string(),
            })?;
        }
        Ok(0)
    }

    fn shrink_to(&mut self, pages: usize) -> std::result::Result<(), StoreError> {
        match pages < self.capacity_pages() {
            true => self.home.shrink_kv(self.bytes(pages)).map_err(failed),
            false => Ok(()),
        }
    }

    fn copy_page(&mut self, copy: PageCopy) -> std::result::Result<(), StoreError> {
        let (from, to, bytes) = (self.at(copy.from, 0), self.at(copy.to, 0), self.geometry.page_bytes() as u64);
        self.home.with_provider(|p| p.copy_within(RangeKind::Kv, from, to, bytes)).map_err(failed)
    }

    fn read(&self, page: u32, offset: usize, into: &mut [u8]) -> std::result::Result<(), StoreError> {
        let at = self.at(page, offset);
        self.home.read_kv(at, into).map_err(failed)
    }

    fn write(&mut self, page: u32, offset: usize, bytes: &[u8]) -> std::result::Result<(), StoreError> {
        let at = self.at(page, offset);
        self.home.with_provider(|p| p.write(RangeKind::Kv, at, bytes)).map_err(failed)
    }
}
