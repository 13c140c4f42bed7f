//! Which granules of a range are mapped: intervals of granule numbers. No device, no addresses.

use std::collections::BTreeMap;
use std::ops::Range;

/// A set of granule numbers, kept as disjoint intervals that don't touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GranuleSet {
    /// First number to the number behind the last.
    runs: BTreeMap<u64, u64>,
}

impl GranuleSet {
    /// Number of granules.
    pub fn count(&self) -> u64 {
        self.runs.iter().map(|(start, end)| end - start).sum()
    }

    /// True if all of `range` is in the set. An empty range is.
    pub fn contains(&self, range: &Range<u64>) -> bool {
        range.is_empty() || self.runs.range(..=range.start).next_back().is_some_and(|(_, &end)| end >= range.end)
    }

    /// True if any of `range` is in the set.
    pub fn touches(&self, range: &Range<u64>) -> bool {
        !range.is_empty() && self.runs.range(..range.end).next_back().is_some_and(|(_, &end)| end > range.start)
    }

    /// The parts of `range` that are in the set, in order.
    pub fn within(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let from = self.runs.range(..=range.start).next_back().map_or(range.start, |(&start, _)| start);
        let runs = self.runs.range(from..).map(|(&start, &end)| start.max(range.start)..end.min(range.end));
        runs.take_while(|r| r.start < range.end).filter(|r| !r.is_empty()).collect()
    }

    /// The parts of `range` that are not in the set, in order.
    pub fn gaps(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = range.start;
        for run in self.within(range) {
            if run.start > at {
                gaps.push(at..run.start);
            }
            at = run.end;
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }

    /// Number behind the last granule; 0 for an empty set.
    pub fn end(&self) -> u64 {
        self.runs.last_key_value().map_or(0, |(_, &end)| end)
    }

    /// Adds `range`, of which nothing may be in the set; false, and no change, if something is.
    pub fn insert(&mut self, range: Range<u64>) -> bool {
        if self.touches(&range) {
            return false;
        }
        if range.is_empty() {
            return true;
        }
        let (mut start, mut end) = (range.start, range.end);
        if let Some((&before, &before_end)) = self.runs.range(..range.start).next_back()
            && before_end == range.start
        {
            start = before;
        }
        if let Some(after_end) = self.runs.remove(&range.end) {
            end = after_end;
        }
        self.runs.insert(start, end);
        true
    }

    /// Takes `range` out, all of which must be in the set; false, and no change, if some isn't.
    pub fn remove(&mut self, range: Range<u64>) -> bool {
        if !self.contains(&range) {
            return false;
        }
        if range.is_empty() {
            return true;
        }
        let Some((&start, &end)) = self.runs.range(..=range.start).next_back() else { return false };
        self.runs.remove(&start);
        if start < range.start {
            self.runs.insert(start, range.start);
        }
        if range.end < end {
            self.runs.insert(range.end, end);
        }
        true
    }
}

/// The granules that `offset .. offset + bytes` lies in; `None` if the sum overflows.
pub fn covering(offset: u64, bytes: u64, granule: u64) -> Option<Range<u64>> {
    let end = offset.checked_add(bytes)?;
    let granule = granule.max(1);
    if bytes == 0 {
        return Some(offset / granule..offset / granule);
    }
    Some(offset / granule..end.div_ceil(granule))
}

/// The granules of `offset .. offset + bytes` where both are whole granules; `None` where they aren't.
pub fn exact(offset: u64, bytes: u64, granule: u64) -> Option<Range<u64>> {
    if granule == 0 || !offset.is_multiple_of(granule) || !bytes.is_multiple_of(granule) {
        return None;
    }
    covering(offset, bytes, granule)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use rand::{Rng, SeedableRng};

    /// Against a set of numbers, over random histories.
    #[test]
    fn intervals_behave_like_the_set_of_their_numbers() {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(7);
        for _ in 0..50 {
            let (mut set, mut model) = (GranuleSet::default(), BTreeSet::new());
            for _ in 0..200 {
                let start = rng.random_range(0u64..40);
                let range = start..start + rng.random_range(0u64..12);
                let numbers: Vec<u64> = range.clone().collect();
                let (all, any) = (numbers.iter().all(|n| model.contains(n)), numbers.iter().any(|n| model.contains(n)));
                assert_eq!((set.contains(&range), set.touches(&range)), (all, any), "{range:?} of {set:?}");
                let inside: Vec<u64> = set.within(&range).into_iter().flatten().collect();
                let gaps: Vec<u64> = set.gaps(&range).into_iter().flatten().collect();
                assert_eq!(inside, numbers.iter().copied().filter(|n| model.contains(n)).collect::<Vec<_>>());
                assert_eq!(gaps, numbers.iter().copied().filter(|n| !model.contains(n)).collect::<Vec<_>>());
                if rng.random() {
                    assert_eq!(set.insert(range), !any);
                    if !any {
                        model.extend(numbers);
                    }
                } else {
                    assert_eq!(set.remove(range), all);
                    if all {
                        numbers.iter().for_each(|n| assert!(model.remove(n)));
                    }
                }
                assert_eq!((set.count(), set.end()), (model.len() as u64, model.last().map_or(0, |n| n + 1)));
                // Neighbours are one interval: the fewest runs there can be.
                let starts = model.iter().filter(|&&n| n == 0 || !model.contains(&(n - 1))).count();
                assert_eq!(set.runs.len(), starts);
            }
        }
    }

    #[test]
    fn bytes_become_granules() {
        assert_eq!(covering(0, 1, 64), Some(0..1));
        assert_eq!(covering(63, 2, 64), Some(0..2));
        assert_eq!(covering(64, 64, 64), Some(1..2));
        assert_eq!(covering(70, 0, 64), Some(1..1));
        assert_eq!(covering(u64::MAX, 1, 64), None);
        assert_eq!(exact(64, 128, 64), Some(1..3));
        assert_eq!(exact(1, 64, 64), None);
        assert_eq!(exact(64, 1, 64), None);
        assert_eq!(exact(0, 0, 0), None);
    }
}
