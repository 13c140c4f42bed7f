//! Sequences and their page tables: which page holds which positions. Pages themselves are the cache's business.

use std::ops::Range;

use crate::error::KvError;

/// Names a sequence of one cache; never names another one after it was freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId {
    slot: u32,
    generation: u32,
}

/// One sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sequence {
    /// Tokens now.
    pub(crate) length: usize,
    /// Tokens that it was admitted to reach.
    pub(crate) max_length: usize,
    /// Entry `i` holds positions `i * page_tokens ..`; exactly the pages that `length` needs.
    pub(crate) pages: Vec<u32>,
}

/// Where a position is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Location {
    /// Page of the store.
    pub page: u32,
    /// Position in the page.
    pub token: usize,
}

/// What an append did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Appended {
    /// The new positions, to be written by the next step.
    pub positions: Range<usize>,
    /// Pages taken, that of a copy included.
    pub new_pages: usize,
}

/// Sequences by id. Slots are used again, under another generation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sequences {
    slots: Vec<Slot>,
    vacant: Vec<u32>,
    live: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Slot {
    generation: u32,
    sequence: Option<Sequence>,
}

impl Sequences {
    pub(crate) fn len(&self) -> usize {
        self.live
    }

    pub(crate) fn get(&self, id: SequenceId) -> Result<&Sequence, KvError> {
        let slot = self.slots.get(id.slot as usize).filter(|s| s.generation == id.generation);
        slot.and_then(|s| s.sequence.as_ref()).ok_or(KvError::UnknownSequence)
    }

    pub(crate) fn get_mut(&mut self, id: SequenceId) -> Result<&mut Sequence, KvError> {
        let slot = self.slots.get_mut(id.slot as usize).filter(|s| s.generation == id.generation);
        slot.and_then(|s| s.sequence.as_mut()).ok_or(KvError::UnknownSequence)
    }

    pub(crate) fn insert(&mut self, sequence: Sequence) -> SequenceId {
        self.live += 1;
        if let Some(slot) = self.vacant.pop()
            && let Some(entry) = self.slots.get_mut(slot as usize)
        {
            entry.sequence = Some(sequence);
            return SequenceId { slot, generation: entry.generation };
        }
        let slot = self.slots.len() as u32;
        self.slots.push(Slot { generation: 0, sequence: Some(sequence) });
        SequenceId { slot, generation: 0 }
    }

    pub(crate) fn remove(&mut self, id: SequenceId) -> Result<Sequence, KvError> {
        let slot = self.slots.get_mut(id.slot as usize).filter(|s| s.generation == id.generation);
        let slot = slot.ok_or(KvError::UnknownSequence)?;
        let sequence = slot.sequence.take().ok_or(KvError::UnknownSequence)?;
        self.live -= 1;
        // A slot whose generations are used up stays empty for ever.
        if let Some(next) = slot.generation.checked_add(1) {
            slot.generation = next;
            self.vacant.push(id.slot);
        }
        Ok(sequence)
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = SequenceId> + '_ {
        let live = self.slots.iter().enumerate().filter(|(_, s)| s.sequence.is_some());
        live.map(|(slot, s)| SequenceId { slot: slot as u32, generation: s.generation })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(length: usize) -> Sequence {
        Sequence { length, max_length: 100, pages: Vec::new() }
    }

    #[test]
    fn an_id_dies_with_its_sequence() {
        let mut s = Sequences::default();
        let (a, b) = (s.insert(sequence(1)), s.insert(sequence(2)));
        assert_eq!(s.remove(a).unwrap().length, 1);
        let c = s.insert(sequence(3));
        assert_eq!(c.slot, a.slot);
        assert_eq!(s.get(a), Err(KvError::UnknownSequence));
        assert_eq!(s.get_mut(a), Err(KvError::UnknownSequence));
        assert_eq!(s.remove(a), Err(KvError::UnknownSequence));
        assert_eq!((s.get(b).unwrap().length, s.get(c).unwrap().length, s.len()), (2, 3, 2));
        assert_eq!(s.ids().collect::<Vec<_>>(), [c, b]);
    }

    #[test]
    fn a_worn_out_slot_is_never_used_again() {
        let mut s = Sequences::default();
        s.insert(sequence(1));
        s.slots[0].generation = u32::MAX;
        let last = s.ids().next().unwrap();
        s.remove(last).unwrap();
        assert_ne!(s.insert(sequence(2)).slot, last.slot);
        assert_eq!((s.get(last), s.len()), (Err(KvError::UnknownSequence), 1));
    }
}
