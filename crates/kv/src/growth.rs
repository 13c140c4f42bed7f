//! Growth and shrinking of a cache and its store, bucket by bucket, in place; and the figures of a cache.

use crate::bucket::{Bucket, Buckets};
use crate::cache::{KvCache, check_page_bytes};
use crate::error::KvError;
use crate::store::{KvPageStore, StoreError};

/// Figures of a cache now, and since its making.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvStats {
    /// Sequences.
    pub sequences: usize,
    /// Tokens of all sequences; a token that two share counts twice.
    pub tokens: usize,
    /// Pages with a holder.
    pub used_pages: usize,
    /// Pages without one.
    pub free_pages: usize,
    /// Pages with two holders or more.
    pub shared_pages: usize,
    /// Pages that the sequences' maxima need in sum, if nothing is shared.
    pub promised_pages: usize,
    /// Pages of the largest bucket.
    pub limit_pages: usize,
    /// The capacity.
    pub bucket: Bucket,
    /// Times the capacity grew from one bucket to a larger one.
    pub growth_events: u64,
    /// Times it shrank.
    pub shrink_events: u64,
    /// Bytes of earlier pages that stores moved while growing, by their own count.
    pub growth_moved_bytes: u64,
    /// Pages copied because a sequence wrote to a shared one.
    pub copied_pages: u64,
}

impl KvCache {
    /// The ladder of capacities.
    pub fn buckets(&self) -> &Buckets {
        &self.buckets
    }

    /// The capacity now; no pages before the first growth.
    pub fn bucket(&self) -> Bucket {
        self.bucket
    }

    /// Figures.
    pub fn stats(&self) -> KvStats {
        KvStats {
            sequences: self.sequences.len(),
            tokens: self.tokens,
            used_pages: self.allocator.used(),
            free_pages: self.allocator.free(),
            shared_pages: self.allocator.shared(),
            promised_pages: self.promised,
            limit_pages: self.buckets.max().pages,
            bucket: self.bucket,
            growth_events: self.growths,
            shrink_events: self.shrinks,
            growth_moved_bytes: self.moved_bytes,
            copied_pages: self.copied_pages,
        }
    }

    /// The bucket to grow to so that `needed` more pages are free, or `None` if they are. For what
    /// [`pages_needed`](Self::pages_needed) says there is always one.
    ///
    /// # Errors
    /// [`KvError::OutOfPages`] if the largest bucket would not do.
    pub fn growth_for(&self, needed: usize) -> Result<Option<Bucket>, KvError> {
        if self.allocator.can_allocate(needed) {
            return Ok(None);
        }
        let bucket = self.allocator.used().checked_add(needed).and_then(|pages| self.buckets.bucket_for(pages));
        let (free, capacity) = (self.allocator.free(), self.allocator.capacity());
        bucket.map(Some).ok_or(KvError::OutOfPages { needed, free, capacity })
    }

    /// Grows store and cache to the smallest bucket of at least `pages` (at least the floor). Moves no byte and
    /// changes no page table. Nothing happens if the capacity is that large.
    ///
    /// # Errors
    /// [`KvError::OutOfPages`] beyond the largest bucket, [`KvError::GeometryMismatch`], [`KvError::Store`].
    pub fn grow(&mut self, store: &mut impl KvPageStore, pages: usize) -> Result<Bucket, KvError> {
        self.check_store(store)?;
        let (free, capacity) = (self.allocator.free(), self.allocator.capacity());
        let out = KvError::OutOfPages { needed: pages.saturating_sub(self.allocator.used()), free, capacity };
        let bucket = self.buckets.bucket_for(pages).ok_or(out)?;
        if bucket.pages <= capacity {
            return Ok(self.bucket);
        }
        let moved = store.grow_to(bucket.pages)?;
        if store.capacity_pages() < bucket.pages {
            let what = format!("grew to {} pages; {} were asked for", store.capacity_pages(), bucket.pages);
            return Err(StoreError::Failed { what }.into());
        }
        self.allocator.set_capacity(bucket.pages)?;
        self.bucket = bucket;
        self.moved_bytes += moved;
        self.growths += u64::from(capacity > 0);
        Ok(bucket)
    }

    /// The smallest bucket of at least `pages` that cuts no page in use: what a shrink can give back now. Pages are
    /// not moved for it; [`PageAllocator::used_from`](crate::PageAllocator::used_from) names those in the way.
    pub fn shrink_for(&self, pages: usize) -> Bucket {
        let keep = self.allocator.highest_used().map_or(0, |p| p as usize + 1);
        let bucket = self.buckets.bucket_for(pages.max(keep));
        bucket.filter(|b| b.pages < self.bucket.pages).unwrap_or(self.bucket)
    }

    /// Shrinks cache and store to the smallest bucket of at least `pages` (at least the floor). Nothing happens if
    /// the capacity is that small.
    ///
    /// # Errors
    /// [`KvError::PagesInUse`] if it would cut pages in use; [`KvError::CopiesPending`];
    /// [`KvError::GeometryMismatch`]; [`KvError::Store`].
    pub fn shrink(&mut self, store: &mut impl KvPageStore, pages: usize) -> Result<Bucket, KvError> {
        self.check_store(store)?;
        let Some(bucket) = self.buckets.bucket_for(pages).filter(|b| b.pages < self.bucket.pages) else {
            return Ok(self.bucket);
        };
        if !self.copies.is_empty() {
            return Err(KvError::CopiesPending { copies: self.copies.len() });
        }
        self.allocator.set_capacity(bucket.pages)?;
        if let Err(e) = store.shrink_to(bucket.pages) {
            self.allocator.set_capacity(self.bucket.pages)?;
            return Err(e.into());
        }
        self.bucket = bucket;
        self.shrinks += 1;
        Ok(bucket)
    }

    /// Takes another ladder, for a limit that changed. The capacity stays until the next growth or shrink.
    ///
    /// # Errors
    /// [`KvError::LimitTooLow`] if the ladder ends below the promised or the mapped pages (shrink first);
    /// [`KvError::Buckets`] if it was made for pages of another size.
    pub fn set_buckets(&mut self, buckets: Buckets) -> Result<(), KvError> {
        check_page_bytes(&self.geometry, &buckets)?;
        let (limit, promised, capacity) = (buckets.max().pages, self.promised, self.bucket.pages);
        if limit < promised.max(capacity) {
            return Err(KvError::LimitTooLow { limit, promised, capacity });
        }
        self.buckets = buckets;
        Ok(())
    }

    fn check_store(&self, store: &impl KvPageStore) -> Result<(), KvError> {
        match store.geometry() == self.geometry {
            true => Ok(()),
            false => Err(KvError::GeometryMismatch),
        }
    }
}
