//! A set of small integers with its least and greatest member at hand; never allocates between resizes.

const WORD: usize = u64::BITS as usize;

/// A set over `0 .. len`. A word of level `n + 1` has a bit for every word of level `n` that isn't zero, so each
/// operation touches `log64(len)` words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BitTree {
    /// Level 0 holds the members; the last level is one word. Empty for an empty range.
    levels: Vec<Vec<u64>>,
    len: usize,
}

impl BitTree {
    /// Changes the range to `0 .. len`, keeping the members that lie in it. O(len).
    pub(crate) fn resize(&mut self, len: usize) {
        let mut words = self.levels.drain(..).next().unwrap_or_default();
        words.resize(len.div_ceil(WORD), 0);
        if let Some(last) = words.last_mut().filter(|_| !len.is_multiple_of(WORD)) {
            *last &= (1 << (len % WORD)) - 1;
        }
        self.len = len;
        while words.len() > 1 {
            let above = words.chunks(WORD).map(pack).collect();
            self.levels.push(std::mem::replace(&mut words, above));
        }
        if len > 0 {
            self.levels.push(words);
        }
    }

    /// Adds `i`, which must be below the length.
    pub(crate) fn insert(&mut self, mut i: usize) {
        debug_assert!(i < self.len);
        for level in &mut self.levels {
            let word = &mut level[i / WORD];
            let was = *word;
            *word |= 1 << (i % WORD);
            if was != 0 {
                return;
            }
            i /= WORD;
        }
    }

    /// Takes `i`, which must be below the length, out.
    pub(crate) fn remove(&mut self, mut i: usize) {
        debug_assert!(i < self.len);
        for level in &mut self.levels {
            let word = &mut level[i / WORD];
            *word &= !(1 << (i % WORD));
            if *word != 0 {
                return;
            }
            i /= WORD;
        }
    }

    /// The least member.
    pub(crate) fn first(&self) -> Option<usize> {
        self.descend(|word| word.trailing_zeros() as usize)
    }

    /// The greatest member.
    pub(crate) fn last(&self) -> Option<usize> {
        self.descend(|word| WORD - 1 - word.leading_zeros() as usize)
    }

    fn descend(&self, pick: impl Fn(u64) -> usize) -> Option<usize> {
        if *self.levels.last()?.first()? == 0 {
            return None;
        }
        Some(self.levels.iter().rev().fold(0, |i, level| i * WORD + pick(level[i])))
    }
}

/// One bit for each word that isn't zero.
fn pack(words: &[u64]) -> u64 {
    words.iter().enumerate().fold(0, |bits, (i, &w)| bits | u64::from(w != 0) << i)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The oracle is the standard library's ordered set; lengths reach three levels.
        #[test]
        fn agrees_with_an_ordered_set(
            steps in prop::collection::vec((0u8..8, 0usize..9000), 1..200),
            start in 0usize..9000,
        ) {
            let (mut tree, mut set, mut len) = (BitTree::default(), BTreeSet::new(), start);
            tree.resize(len);
            for (what, x) in steps {
                match what {
                    0 => {
                        len = x;
                        tree.resize(len);
                        set.retain(|&m| m < len);
                    }
                    1..=4 if x < len => {
                        tree.insert(x);
                        set.insert(x);
                    }
                    5 if x < len => {
                        tree.remove(x);
                        set.remove(&x);
                    }
                    6 => {
                        if let Some(x) = set.pop_first() {
                            tree.remove(x);
                        }
                    }
                    7 => {
                        if let Some(x) = set.pop_last() {
                            tree.remove(x);
                        }
                    }
                    _ => {}
                }
                prop_assert_eq!(tree.first(), set.first().copied());
                prop_assert_eq!(tree.last(), set.last().copied());
            }
        }
    }
}
