//! How long a request may have to wait, in steps.

use crate::engine::Engine;

/// What a request still takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    /// Rows of its prompt.
    pub prompt: usize,
    /// New tokens at most.
    pub new: usize,
    /// Pages promised to it, or to be.
    pub pages: usize,
}

/// Most steps until a request of `pages` pages starts behind the requests `before` it, which all start first.
///
/// Every step until then is one of these:
/// * A prompt is unfinished. The others decode one row each at most, so prompts get `max_rows - max_batch + 1` rows at least:
///   there are at most so many such steps as that goes into all prompts, and one more for each prompt, whose end may leave rows
///   unused; and for each, as many as are in flight without it when it starts, one less than may be while nothing is cold.
/// * All decode and all seats are taken: `max_batch` tokens of those still to come are given.
/// * All decode and the request at the front lacks pages: then those in work were promised more than the pages there are less
///   its own. Each gives a token at least. Weigh each token still to come with its request's pages: such a step takes off at
///   least as much as those in work were promised.
pub(super) fn steps_until_started(engine: &Engine, pages: usize, before: impl Iterator<Item = Work>) -> u64 {
    let seats = engine.options().max_batch;
    let prompt_rows = engine.options().max_rows() - seats + 1;
    let (mut prompts, mut requests, mut tokens, mut page_tokens, mut most) = (0u64, 0u64, 0u64, 0u64, pages);
    for work in before {
        prompts += work.prompt as u64;
        requests += 1;
        tokens += work.new as u64;
        page_tokens += work.new as u64 * work.pages as u64;
        most = most.max(work.pages);
    }
    let promised = engine.max_pages().saturating_sub(most) as u64 + 1;
    let late = requests * engine.options().in_flight(false).max(1) as u64;
    prompts / prompt_rows as u64 + late + tokens / seats as u64 + page_tokens / promised
}
