//! The KV of all sequences: admission, append, fork, rewind, free. What a step needs before it runs, and no bytes.

use crate::allocator::PageAllocator;
use crate::bucket::{Bucket, Buckets};
use crate::error::KvError;
use crate::geometry::KvGeometry;
use crate::sequence::{Appended, Location, Sequence, SequenceId, Sequences};
use crate::store::{KvPageStore, PageCopy, StoreError};

/// Page tables, lengths and promises of the sequences that share one store.
///
/// Sequences admitted with declared maxima never promise more pages in sum than the largest bucket has. A fork is
/// charged as if it shared nothing: so no rewind, copy on write or free of one sequence can break the promise to
/// another. A promise withholds no memory; it only bounds who may enter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvCache {
    pub(crate) geometry: KvGeometry,
    pub(crate) buckets: Buckets,
    pub(crate) bucket: Bucket,
    pub(crate) allocator: PageAllocator,
    pub(crate) sequences: Sequences,
    pub(crate) copies: Vec<PageCopy>,
    pub(crate) promised: usize,
    pub(crate) tokens: usize,
    pub(crate) growths: u64,
    pub(crate) shrinks: u64,
    pub(crate) moved_bytes: u64,
    pub(crate) copied_pages: u64,
}

impl KvCache {
    /// A cache without memory: [`grow`](Self::grow) it before the first append.
    ///
    /// # Errors
    /// [`KvError::Geometry`]; [`KvError::Buckets`] if the buckets were made for pages of another size.
    pub fn new(geometry: KvGeometry, buckets: Buckets) -> Result<Self, KvError> {
        geometry.validate()?;
        check_page_bytes(&geometry, &buckets)?;
        Ok(KvCache {
            geometry,
            buckets,
            bucket: Bucket::default(),
            allocator: PageAllocator::new(),
            sequences: Sequences::default(),
            copies: Vec::new(),
            promised: 0,
            tokens: 0,
            growths: 0,
            shrinks: 0,
            moved_bytes: 0,
            copied_pages: 0,
        })
    }

    /// Sizes of a page.
    pub fn geometry(&self) -> KvGeometry {
        self.geometry
    }

    /// Free, used and shared pages.
    pub fn allocator(&self) -> &PageAllocator {
        &self.allocator
    }

    /// True if a sequence of at most `max_length` tokens can be admitted.
    pub fn admits(&self, max_length: usize) -> bool {
        self.admission(max_length, self.promised).is_ok()
    }

    /// Admits an empty sequence that may reach `max_length` tokens. Takes no page yet.
    ///
    /// # Errors
    /// [`KvError::NotAdmissible`].
    pub fn create(&mut self, max_length: usize) -> Result<SequenceId, KvError> {
        let pages = self.admission(max_length, self.promised)?;
        self.promised += pages;
        Ok(self.sequences.insert(Sequence { length: 0, max_length, pages: Vec::with_capacity(pages) }))
    }

    /// Changes the maximum of a sequence, under the same condition as its admission.
    ///
    /// # Errors
    /// [`KvError::NotAdmissible`]; [`KvError::LengthExceeded`] if the sequence is longer already;
    /// [`KvError::UnknownSequence`].
    pub fn set_max_length(&mut self, id: SequenceId, max_length: usize) -> Result<(), KvError> {
        let sequence = self.sequences.get(id)?;
        if max_length < sequence.length {
            return Err(KvError::LengthExceeded { asked: sequence.length, max_length });
        }
        let others = self.promised - self.geometry.pages_for(sequence.max_length);
        let pages = self.admission(max_length, others)?;
        self.promised = others + pages;
        let sequence = self.sequences.get_mut(id)?;
        sequence.max_length = max_length;
        sequence.pages.reserve_exact(pages.saturating_sub(sequence.pages.len()));
        Ok(())
    }

    /// Pages that appending `tokens` to each sequence takes in all, copies included. Name a sequence once at most.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`], [`KvError::LengthExceeded`].
    pub fn pages_needed(&self, appends: &[(SequenceId, usize)]) -> Result<usize, KvError> {
        let mut needed = 0;
        for (i, &(id, tokens)) in appends.iter().enumerate() {
            let sequence = self.sequences.get(id)?;
            needed += self.new_pages(sequence, tokens)?;
            if let Some(page) = self.partial_page(sequence, tokens) {
                // Each sequence named earlier that writes to the same page leaves it with one holder fewer.
                let holders = self.allocator.references(page) as usize;
                let writes_too = |&&(other, tokens): &&(SequenceId, usize)| {
                    self.sequences.get(other).is_ok_and(|s| self.partial_page(s, tokens) == Some(page))
                };
                let gone = if holders > 1 { appends[..i].iter().filter(writes_too).count() } else { 0 };
                needed += usize::from(holders > gone + 1);
            }
        }
        Ok(needed)
    }

    /// Makes a sequence `tokens` longer and takes the pages for it. If the first new position lies in a page with
    /// other holders, the sequence gets a copy of that page: the copy is queued and must be done before the next step,
    /// whether the step writes to this sequence or not. Allocates nothing on the heap unless a copy is queued.
    ///
    /// # Errors
    /// [`KvError::OutOfPages`]: grow, then ask again. [`KvError::LengthExceeded`], [`KvError::UnknownSequence`].
    pub fn append(&mut self, id: SequenceId, tokens: usize) -> Result<Appended, KvError> {
        let sequence = self.sequences.get(id)?;
        let positions = sequence.length..sequence.length.saturating_add(tokens);
        let new_pages = self.new_pages(sequence, tokens)?;
        let shared = self.partial_page(sequence, tokens).filter(|&p| self.allocator.references(p) > 1);
        let needed = new_pages + usize::from(shared.is_some());
        if !self.allocator.can_allocate(needed) {
            let (free, capacity) = (self.allocator.free(), self.allocator.capacity());
            return Err(KvError::OutOfPages { needed, free, capacity });
        }
        let sequence = self.sequences.get_mut(id)?;
        if let Some(from) = shared {
            let to = self.allocator.allocate()?;
            self.allocator.release(from)?;
            sequence.pages.pop();
            sequence.pages.push(to);
            self.copies.push(PageCopy { from, to });
        }
        for _ in 0..new_pages {
            sequence.pages.push(self.allocator.allocate()?);
        }
        sequence.length = positions.end;
        self.tokens += tokens;
        Ok(Appended { positions, new_pages: needed })
    }

    /// Admits a second sequence with the same tokens. It shares all pages, also the partly filled one, until one of
    /// the two writes to that one. Takes no page. Fork between steps: tokens that were appended and not yet written by
    /// a step are not there to be shared.
    ///
    /// # Errors
    /// [`KvError::NotAdmissible`]; [`KvError::LengthExceeded`] if `max_length` is below the length;
    /// [`KvError::TooManyReferences`]; [`KvError::UnknownSequence`].
    pub fn fork(&mut self, id: SequenceId, max_length: usize) -> Result<SequenceId, KvError> {
        let parent = self.sequences.get(id)?;
        let length = parent.length;
        if max_length < length {
            return Err(KvError::LengthExceeded { asked: length, max_length });
        }
        let promise = self.admission(max_length, self.promised)?;
        let full = parent.pages.iter().find(|&&p| self.allocator.references(p) == u32::MAX);
        if let Some(&page) = full {
            return Err(KvError::TooManyReferences { page });
        }
        let mut pages = Vec::with_capacity(promise);
        pages.extend_from_slice(&parent.pages);
        for &page in &pages {
            self.allocator.retain(page)?;
        }
        self.promised += promise;
        self.tokens += length;
        Ok(self.sequences.insert(Sequence { length, max_length, pages }))
    }

    /// Cuts a sequence to its first `length` tokens and lets go of the pages beyond. Its maximum stays.
    ///
    /// # Errors
    /// [`KvError::RewindForward`], [`KvError::UnknownSequence`].
    pub fn rewind(&mut self, id: SequenceId, length: usize) -> Result<(), KvError> {
        let sequence = self.sequences.get_mut(id)?;
        if length > sequence.length {
            return Err(KvError::RewindForward { length: sequence.length, asked: length });
        }
        for page in sequence.pages.drain(self.geometry.pages_for(length)..) {
            self.allocator.release(page)?;
        }
        self.tokens -= sequence.length - length;
        sequence.length = length;
        Ok(())
    }

    /// Ends a sequence: lets go of its pages and its promise.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn free(&mut self, id: SequenceId) -> Result<(), KvError> {
        let sequence = self.sequences.remove(id)?;
        for page in sequence.pages {
            self.allocator.release(page)?;
        }
        self.tokens -= sequence.length;
        self.promised -= self.geometry.pages_for(sequence.max_length);
        Ok(())
    }

    /// Tokens of a sequence.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn length(&self, id: SequenceId) -> Result<usize, KvError> {
        Ok(self.sequences.get(id)?.length)
    }

    /// Tokens that a sequence was admitted to reach.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn max_length(&self, id: SequenceId) -> Result<usize, KvError> {
        Ok(self.sequences.get(id)?.max_length)
    }

    /// A sequence's pages in order: entry `i` holds positions `i * page_tokens ..`.
    ///
    /// # Errors
    /// [`KvError::UnknownSequence`].
    pub fn page_table(&self, id: SequenceId) -> Result<&[u32], KvError> {
        Ok(&self.sequences.get(id)?.pages)
    }

    /// Where a position of a sequence is.
    ///
    /// # Errors
    /// [`KvError::LengthExceeded`] beyond its tokens, [`KvError::UnknownSequence`].
    pub fn locate(&self, id: SequenceId, position: usize) -> Result<Location, KvError> {
        let sequence = self.sequences.get(id)?;
        let page = sequence.pages.get(position / self.geometry.page_tokens).filter(|_| position < sequence.length);
        match page {
            Some(&page) => Ok(Location { page, token: position % self.geometry.page_tokens }),
            None => Err(KvError::LengthExceeded { asked: position.saturating_add(1), max_length: sequence.length }),
        }
    }

    /// All sequences.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> + '_ {
        self.sequences.ids()
    }

    /// Copies that wait, in the order in which they must be done.
    pub fn pending_copies(&self) -> &[PageCopy] {
        &self.copies
    }

    /// Does the pending copies; returns how many. After an error the failed copy and those behind it still wait.
    ///
    /// # Errors
    /// [`KvError::Store`].
    pub fn copy_pages(&mut self, store: &mut impl KvPageStore) -> Result<usize, KvError> {
        let failed = self.copies.iter().enumerate().find_map(|(i, &c)| store.copy_page(c).err().map(|e| (i, e)));
        let done = failed.as_ref().map_or(self.copies.len(), |(i, _)| *i);
        self.copies.drain(..done);
        self.copied_pages += done as u64;
        failed.map_or(Ok(done), |(_, e): (usize, StoreError)| Err(e.into()))
    }

    /// Pages of a new promise, if it fits beside `others` promised pages.
    fn admission(&self, max_length: usize, others: usize) -> Result<usize, KvError> {
        let (pages, limit) = (self.geometry.pages_for(max_length), self.buckets.max().pages);
        match others.checked_add(pages).is_some_and(|sum| sum <= limit) {
            true => Ok(pages),
            false => Err(KvError::NotAdmissible { max_length, pages, promised: others, limit }),
        }
    }

    /// Pages that an append adds to the page table.
    fn new_pages(&self, sequence: &Sequence, tokens: usize) -> Result<usize, KvError> {
        let (asked, max_length) = (sequence.length.saturating_add(tokens), sequence.max_length);
        match asked <= max_length {
            true => Ok(self.geometry.pages_for(asked) - sequence.pages.len()),
            false => Err(KvError::LengthExceeded { asked, max_length }),
        }
    }

    /// The partly filled page that an append writes to.
    fn partial_page(&self, sequence: &Sequence, tokens: usize) -> Option<u32> {
        let partial = tokens > 0 && !sequence.length.is_multiple_of(self.geometry.page_tokens);
        sequence.pages.last().copied().filter(|_| partial)
    }
}

/// Buckets must be those of the geometry's pages.
pub(crate) fn check_page_bytes(geometry: &KvGeometry, buckets: &Buckets) -> Result<(), KvError> {
    let (have, want) = (buckets.page_bytes(), geometry.page_bytes() as u64);
    match have == want {
        true => Ok(()),
        false => Err(KvError::Buckets { what: format!("made for pages of {have} bytes; a page has {want}") }),
    }
}
