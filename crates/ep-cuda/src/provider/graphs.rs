//! The memory of captured graphs: a fixed allowance that they never exceed together, and who leaves when it is full.

use headrace_provider::DeviceError;

use super::CudaProvider;
use crate::buckets::GraphKey;
use crate::graph::StepGraph;
use crate::recorded::Recorded;

/// Bytes that all graphs of a device may take together, charged from the beginning. What each really takes is known once it
/// is captured; the largest one so far is what the next is expected to take.
pub const GRAPH_BYTES: u64 = 32 << 20;

/// What has to happen before a graph of `next` bytes may be captured beside `held` bytes of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// It fits.
    Enough,
    /// Another one has to be dropped first.
    Drop,
    /// It can never fit.
    Never,
}

fn room(held: u64, next: u64, others: bool) -> Room {
    match held.saturating_add(next) <= GRAPH_BYTES {
        true => Room::Enough,
        false if others => Room::Drop,
        false => Room::Never,
    }
}

impl CudaProvider {
    /// Bytes that the graphs of all programs take; the one that is in the middle of a step is not among them.
    pub(super) fn graph_bytes_now(&self) -> u64 {
        self.programs.values().map(Recorded::graph_bytes).sum()
    }

    /// Before a capture for `recorded`: drops graphs, the longest unused first, until one of the largest size seen fits.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if it can't fit beside nothing at all.
    pub(crate) fn room_for_graph(&mut self, recorded: &mut Recorded) -> Result<(), DeviceError> {
        self.room_for(recorded, self.largest_graph, None)
    }

    /// After a capture: takes the graph up, or drops it where it is larger than everything that was set aside.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] names what it takes and what was set aside.
    pub(crate) fn keep_graph(
        &mut self,
        recorded: &mut Recorded,
        key: GraphKey,
        graph: StepGraph,
    ) -> Result<(), DeviceError> {
        self.largest_graph = self.largest_graph.max(graph.bytes().min(GRAPH_BYTES));
        // What is dropped here is past use: nothing waits for a graph that was never launched.
        self.room_for(recorded, graph.bytes(), Some(key))?;
        recorded.graphs.insert(key, graph);
        Ok(())
    }

    fn room_for(&mut self, recorded: &mut Recorded, next: u64, new: Option<GraphKey>) -> Result<(), DeviceError> {
        loop {
            let held = self.graph_bytes_now() + recorded.graph_bytes();
            let oldest_here = recorded.graphs.iter().map(|(key, g)| (g.last_used(), None, *key)).min_by_key(|c| c.0);
            let elsewhere = self.programs.iter().flat_map(|(id, p)| p.graphs.iter().map(move |g| (*id, g)));
            let elsewhere = elsewhere.map(|(id, (key, g))| (g.last_used(), Some(id), *key)).min_by_key(|c| c.0);
            let oldest = oldest_here.into_iter().chain(elsewhere).min_by_key(|candidate| candidate.0);
            match (room(held, next, oldest.is_some()), oldest) {
                (Room::Enough, _) => return Ok(()),
                (Room::Drop, Some((_, program, key))) => {
                    // A step in flight may still run it.
                    self.streams.fence().map_err(|e| self.context.failed(e))?;
                    let graphs = match program {
                        Some(id) => self.programs.get_mut(&id).map(|p| &mut p.graphs),
                        None => Some(&mut recorded.graphs),
                    };
                    let dropped = graphs.and_then(|graphs| graphs.remove(&key));
                    self.counters.dropped += 1;
                    let bytes = dropped.map_or(0, |g| g.bytes());
                    log::info!("{}: a graph of {bytes} bytes was dropped for another one", self.context.name());
                }
                _ => {
                    let reason = format!("all graphs together may take {GRAPH_BYTES} bytes");
                    let what = new.map_or_else(|| "a graph".to_string(), |key| format!("the graph of {key:?}"));
                    return Err(self.context.no_memory(what, next, reason));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graphs_share_one_allowance() {
        assert_eq!(room(0, 0, false), Room::Enough);
        assert_eq!(room(GRAPH_BYTES - 5, 5, true), Room::Enough);
        assert_eq!(room(GRAPH_BYTES - 5, 6, true), Room::Drop);
        assert_eq!(room(0, GRAPH_BYTES + 1, false), Room::Never);
        assert_eq!(room(u64::MAX, u64::MAX, true), Room::Drop);
    }
}
