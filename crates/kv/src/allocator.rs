//! Which pages are free and how many holders each used page has. Lowest page first, so that a shrink finds a free tail.

use crate::bit_tree::BitTree;
use crate::error::KvError;

/// Hands out pages `0 .. capacity`. Every operation but a change of capacity is O(log capacity) and allocates nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageAllocator {
    /// Holders of each page; 0 is free.
    references: Vec<u32>,
    free: BitTree,
    used: BitTree,
    used_pages: usize,
    shared_pages: usize,
}

impl PageAllocator {
    /// An allocator of no pages.
    pub fn new() -> Self {
        Self::default()
    }

    /// Pages in all.
    pub fn capacity(&self) -> usize {
        self.references.len()
    }

    /// Pages with a holder.
    pub fn used(&self) -> usize {
        self.used_pages
    }

    /// Pages without a holder.
    pub fn free(&self) -> usize {
        self.capacity() - self.used_pages
    }

    /// Pages with two holders or more.
    pub fn shared(&self) -> usize {
        self.shared_pages
    }

    /// True if `pages` pages are free.
    pub fn can_allocate(&self, pages: usize) -> bool {
        pages <= self.free()
    }

    /// Holders of a page; 0 if it is free or beyond the capacity.
    pub fn references(&self, page: u32) -> u32 {
        self.references.get(page as usize).copied().unwrap_or(0)
    }

    /// The highest page in use.
    pub fn highest_used(&self) -> Option<u32> {
        self.used.last().map(|p| p as u32)
    }

    /// Pages in use at or beyond `page`, increasing. O(capacity): for reports.
    pub fn used_from(&self, page: usize) -> impl Iterator<Item = u32> + '_ {
        self.references.iter().enumerate().skip(page).filter(|(_, r)| **r > 0).map(|(p, _)| p as u32)
    }

    /// Takes the lowest free page, with one holder.
    ///
    /// # Errors
    /// [`KvError::OutOfPages`] if none is free.
    pub fn allocate(&mut self) -> Result<u32, KvError> {
        let Some(page) = self.free.first() else {
            return Err(KvError::OutOfPages { needed: 1, free: 0, capacity: self.capacity() });
        };
        self.free.remove(page);
        self.used.insert(page);
        self.references[page] = 1;
        self.used_pages += 1;
        Ok(page as u32)
    }

    /// Adds a holder to a page in use.
    ///
    /// # Errors
    /// [`KvError::PageNotInUse`], [`KvError::TooManyReferences`].
    pub fn retain(&mut self, page: u32) -> Result<(), KvError> {
        let references = self.in_use(page)?;
        let more = references.checked_add(1).ok_or(KvError::TooManyReferences { page })?;
        self.shared_pages += usize::from(more == 2);
        self.references[page as usize] = more;
        Ok(())
    }

    /// Takes a holder from a page. True if it was the last one and the page is free now.
    ///
    /// # Errors
    /// [`KvError::PageNotInUse`].
    pub fn release(&mut self, page: u32) -> Result<bool, KvError> {
        let left = self.in_use(page)? - 1;
        self.references[page as usize] = left;
        self.shared_pages -= usize::from(left == 1);
        if left == 0 {
            self.used.remove(page as usize);
            self.free.insert(page as usize);
            self.used_pages -= 1;
        }
        Ok(left == 0)
    }

    /// Grows or shrinks to `pages`. O(pages).
    ///
    /// # Errors
    /// [`KvError::PagesInUse`] if a page in use would be cut; [`KvError::Buckets`] beyond 32-bit page numbers.
    pub fn set_capacity(&mut self, pages: usize) -> Result<(), KvError> {
        if u32::try_from(pages).is_err() {
            return Err(KvError::Buckets { what: format!("{pages} pages are more than can be numbered") });
        }
        if let Some(highest) = self.highest_used().filter(|&h| h as usize >= pages) {
            return Err(KvError::PagesInUse { capacity: pages, in_use: self.used_from(pages).count(), highest });
        }
        let before = self.capacity();
        self.references.resize(pages, 0);
        self.used.resize(pages);
        self.free.resize(pages);
        (before..pages).for_each(|p| self.free.insert(p));
        Ok(())
    }

    fn in_use(&self, page: u32) -> Result<u32, KvError> {
        match self.references(page) {
            0 => Err(KvError::PageNotInUse { page }),
            references => Ok(references),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_lowest_free_page_comes_first() {
        let mut a = PageAllocator::new();
        a.set_capacity(200).unwrap();
        for page in 0..200 {
            assert_eq!(a.allocate(), Ok(page));
        }
        assert_eq!(a.allocate(), Err(KvError::OutOfPages { needed: 1, free: 0, capacity: 200 }));
        for page in [150, 3, 77] {
            assert_eq!(a.release(page), Ok(true));
        }
        assert_eq!([a.allocate(), a.allocate(), a.allocate()], [Ok(3), Ok(77), Ok(150)]);
    }

    #[test]
    fn a_page_is_released_once_per_holder() {
        let mut a = PageAllocator::new();
        a.set_capacity(2).unwrap();
        let page = a.allocate().unwrap();
        a.retain(page).unwrap();
        assert_eq!((a.references(page), a.shared(), a.used()), (2, 1, 1));
        assert_eq!(a.release(page), Ok(false));
        assert_eq!((a.references(page), a.shared(), a.used()), (1, 0, 1));
        assert_eq!(a.release(page), Ok(true));
        let free = a.clone();
        assert_eq!(a.release(page), Err(KvError::PageNotInUse { page }));
        assert_eq!(a.retain(page), Err(KvError::PageNotInUse { page }));
        assert_eq!(a.retain(99), Err(KvError::PageNotInUse { page: 99 }));
        assert_eq!(a, free);
    }

    #[test]
    fn a_shrink_never_cuts_a_page_in_use() {
        let mut a = PageAllocator::new();
        a.set_capacity(100).unwrap();
        (0..70).for_each(|p| assert_eq!(a.allocate(), Ok(p)));
        (10..69).for_each(|p| assert_eq!(a.release(p), Ok(true)));
        let before = a.clone();
        assert_eq!(a.set_capacity(5), Err(KvError::PagesInUse { capacity: 5, in_use: 6, highest: 69 }));
        assert_eq!(a, before);
        assert_eq!(a.used_from(8).collect::<Vec<_>>(), [8, 9, 69]);
        a.set_capacity(70).unwrap();
        assert_eq!((a.capacity(), a.free(), a.highest_used()), (70, 59, Some(69)));
        a.release(69).unwrap();
        a.set_capacity(10).unwrap();
        assert_eq!(a.free(), 0);
    }

    proptest! {
        #[test]
        fn agrees_with_a_map_of_counts(steps in prop::collection::vec((0u8..10, 0usize..300), 1..300)) {
            let (mut a, mut model, mut capacity) = (PageAllocator::new(), BTreeMap::<u32, u32>::new(), 0);
            for (what, x) in steps {
                let before = a.clone();
                let page = model.keys().copied().nth(x % model.len().max(1)).unwrap_or(x as u32);
                match what {
                    0 => {
                        let fits = model.keys().all(|&p| (p as usize) < x);
                        prop_assert_eq!(a.set_capacity(x).is_ok(), fits);
                        if fits {
                            capacity = x;
                        }
                    }
                    1..=5 => {
                        let lowest = (0..capacity as u32).find(|p| !model.contains_key(p));
                        prop_assert_eq!(a.allocate().ok(), lowest);
                        model.extend(lowest.map(|p| (p, 1)));
                    }
                    6 => match model.get_mut(&page) {
                        Some(n) => {
                            a.retain(page).unwrap();
                            *n += 1;
                        }
                        None => prop_assert!(a.retain(page).is_err() && a == before),
                    },
                    _ => match model.get_mut(&page) {
                        Some(n) => {
                            *n -= 1;
                            prop_assert_eq!(a.release(page).unwrap(), *n == 0);
                            model.retain(|_, n| *n > 0);
                        }
                        None => prop_assert!(a.release(page).is_err() && a == before),
                    },
                }
                prop_assert_eq!(a.capacity(), capacity);
                prop_assert_eq!(a.used(), model.len());
                prop_assert_eq!(a.free(), capacity - model.len());
                prop_assert_eq!(a.shared(), model.values().filter(|&&n| n > 1).count());
                prop_assert_eq!(a.highest_used(), model.keys().last().copied());
                for p in 0..capacity as u32 {
                    prop_assert_eq!(a.references(p), model.get(&p).copied().unwrap_or(0));
                }
            }
        }
    }
}
