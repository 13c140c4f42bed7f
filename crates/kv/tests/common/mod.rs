//! A cache, its store, and the naive model beside them: every sequence as a whole list of tokens.
#![allow(dead_code)]

use std::collections::BTreeMap;

use headrace_kv::{Buckets, KvCache, KvError, KvGeometry, KvHalf, KvLayout, KvPageStore, SequenceId, VecStore};
use headrace_numerics::elementwise::KvDtype;

/// An entry of two fp16 elements holds one `u32`.
pub fn geometry(layout: KvLayout) -> KvGeometry {
    KvGeometry { layers: 2, kv_heads: 2, head_dim: 2, dtype: KvDtype::F16, layout, page_tokens: 32 }
}

pub struct Rig {
    pub cache: KvCache,
    pub store: VecStore,
    pub model: Vec<(SequenceId, Vec<u32>)>,
    next_token: u32,
}

impl Rig {
    pub fn new(layout: KvLayout, max_pages: usize, granule: u64) -> Self {
        let geometry = geometry(layout);
        let buckets = Buckets::new(1, max_pages, geometry.page_bytes() as u64, granule).unwrap();
        let mut store = VecStore::new(geometry);
        let mut cache = KvCache::new(geometry, buckets).unwrap();
        cache.grow(&mut store, 1).unwrap();
        Rig { cache, store, model: Vec::new(), next_token: 1 }
    }

    pub fn create(&mut self, max_length: usize) -> Result<usize, KvError> {
        let id = self.cache.create(max_length)?;
        self.model.push((id, Vec::new()));
        Ok(self.model.len() - 1)
    }

    /// Makes room as an engine does.
    pub fn make_room(&mut self, appends: &[(SequenceId, usize)]) {
        let needed = self.cache.pages_needed(appends).unwrap();
        if let Some(bucket) = self.cache.growth_for(needed).unwrap() {
            assert_eq!(self.cache.grow(&mut self.store, bucket.pages), Ok(bucket));
        }
        assert!(self.cache.allocator().can_allocate(needed));
    }

    /// The model's side of a step: fresh tokens at the end of a sequence.
    pub fn extend(&mut self, at: usize, tokens: usize) {
        let from = self.next_token;
        self.next_token += tokens as u32;
        self.model[at].1.extend(from..self.next_token);
    }

    /// The step: copies, then all positions from `from` on of a sequence.
    pub fn write(&mut self, at: usize, from: usize) {
        self.cache.copy_pages(&mut self.store).unwrap();
        let (id, tokens) = &self.model[at];
        for (position, &token) in tokens.iter().enumerate().skip(from) {
            let place = self.cache.locate(*id, position).unwrap();
            for (offset, mask) in entries(self.cache.geometry(), place.token) {
                self.store.write(place.page, offset, &(token ^ mask).to_le_bytes()).unwrap();
            }
        }
    }

    /// One sequence, one step, with room made for it.
    pub fn append(&mut self, at: usize, tokens: usize) {
        let id = self.model[at].0;
        self.make_room(&[(id, tokens)]);
        let from = self.cache.append(id, tokens).unwrap().positions.start;
        self.extend(at, tokens);
        self.write(at, from);
    }

    pub fn fork(&mut self, at: usize, max_length: usize) -> Result<usize, KvError> {
        let (id, tokens) = self.model[at].clone();
        let child = self.cache.fork(id, max_length)?;
        self.model.push((child, tokens));
        Ok(self.model.len() - 1)
    }

    /// Everything that must hold between steps.
    pub fn check(&self) {
        let (cache, geometry) = (&self.cache, self.cache.geometry());
        let mut holders = BTreeMap::<u32, u32>::new();
        for (id, tokens) in &self.model {
            assert_eq!(cache.length(*id), Ok(tokens.len()));
            let table = cache.page_table(*id).unwrap();
            assert_eq!(table.len(), geometry.pages_for(tokens.len()), "pages of a sequence");
            table.iter().for_each(|&p| *holders.entry(p).or_default() += 1);
            for (position, &token) in tokens.iter().enumerate() {
                let place = cache.locate(*id, position).unwrap();
                assert_eq!(place.page, table[position / geometry.page_tokens]);
                for (offset, mask) in entries(geometry, place.token) {
                    let mut bytes = [0; 4];
                    self.store.read(place.page, offset, &mut bytes).unwrap();
                    assert_eq!(u32::from_le_bytes(bytes) ^ mask, token, "position {position} of {id:?}");
                }
            }
            assert!(cache.locate(*id, tokens.len()).is_err());
        }
        let (stats, allocator) = (cache.stats(), cache.allocator());
        for page in 0..allocator.capacity() as u32 {
            assert_eq!(allocator.references(page), holders.get(&page).copied().unwrap_or(0), "holders of page {page}");
        }
        assert_eq!(stats.used_pages, holders.len(), "leaked pages");
        assert_eq!(stats.free_pages, stats.bucket.pages - holders.len());
        assert_eq!(stats.shared_pages, holders.values().filter(|&&n| n > 1).count());
        assert_eq!(stats.sequences, self.model.len());
        assert_eq!(stats.tokens, self.model.iter().map(|(_, t)| t.len()).sum::<usize>());
        let maxima = self.model.iter().map(|(id, _)| geometry.pages_for(cache.max_length(*id).unwrap()));
        assert_eq!(stats.promised_pages, maxima.sum::<usize>());
        assert!(stats.used_pages <= stats.promised_pages && stats.promised_pages <= stats.limit_pages);
        assert_eq!(stats.growth_moved_bytes, 0);
        assert_eq!(self.store.capacity_pages(), stats.bucket.pages);
        assert_eq!(cache.sequences().count(), self.model.len());
    }
}

/// All entries of a position in its page, each with a mask that makes its bytes its own.
fn entries(g: KvGeometry, token: usize) -> impl Iterator<Item = (usize, u32)> {
    (0..g.layers).flat_map(move |layer| {
        [KvHalf::Key, KvHalf::Value].into_iter().flat_map(move |half| {
            (0..g.kv_heads).map(move |head| {
                let mask = (layer as u32) << 30 | u32::from(half == KvHalf::Value) << 29 | (head as u32) << 28;
                (g.offset(layer, half, head, token), mask)
            })
        })
    })
}
