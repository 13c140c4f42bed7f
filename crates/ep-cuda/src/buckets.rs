//! Which captured graph serves a step: row counts and context lengths, rounded up to a few sizes.

use headrace_numerics::attention::CHUNK;

/// Most bytes of partial results of attention that are kept: what one step of few rows over a long context needs.
pub const PARTIALS_BYTES: u64 = 64 << 20;

/// What a captured graph is for. A step of fewer rows, fewer wanted rows and shorter contexts replays it too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GraphKey {
    /// Rows.
    pub rows: usize,
    /// Wanted rows; at least 1.
    pub wanted: usize,
    /// Chunks of positions that attention splits a context into; 0 where it isn't split.
    pub chunks: usize,
}

/// The smallest of 1, 2, 4, 8, .. `max` that holds `count`; `max` itself is the last one.
pub fn bucket(count: usize, max: usize) -> usize {
    count.max(1).checked_next_power_of_two().unwrap_or(max).min(max.max(1))
}

/// Bytes of attention's partial results for one row and one chunk over all query heads.
fn partial_bytes(heads: usize, head_dim: usize) -> u64 {
    crate::abi::AttentionArgs::partials_bytes(1, heads, 1, head_dim) as u64
}

/// Chunks for which attention over contexts of `positions` is captured: 8, 32, 128, then twice as many each time, or 0 if `rows` rows
/// fill the card without a split or their partial results would take more than `limit` bytes.
pub fn attention_chunks(rows: usize, heads: usize, head_dim: usize, positions: usize, limit: u64) -> usize {
    /// From this many rows on, a block for each row and head keeps every multiprocessor busy.
    const ENOUGH_ROWS: usize = 64;
    let need = positions.div_ceil(CHUNK).max(1);
    let mut chunks = 8usize;
    while chunks < need {
        chunks = chunks.saturating_mul(if chunks < 128 { 4 } else { 2 });
    }
    let bytes = (rows as u64).saturating_mul(chunks as u64).saturating_mul(partial_bytes(heads, head_dim));
    if rows >= ENOUGH_ROWS || bytes > limit { 0 } else { chunks }
}

/// The most bytes of partial results that [`attention_chunks`] can ask for with contexts of `max_context`.
pub fn partials_bytes(max_rows: usize, heads: usize, head_dim: usize, max_context: usize, limit: u64) -> u64 {
    let mut most = 0;
    let mut rows = 1;
    loop {
        let row_bucket = bucket(rows, max_rows);
        let mut positions = 1usize;
        loop {
            let chunks = attention_chunks(row_bucket, heads, head_dim, positions, limit);
            most = most.max(row_bucket as u64 * chunks as u64 * partial_bytes(heads, head_dim));
            if positions >= max_context {
                break;
            }
            positions = positions.saturating_mul(2).min(max_context);
        }
        if row_bucket >= max_rows.max(1) {
            return most;
        }
        rows = row_bucket + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_powers_of_two_up_to_the_largest() {
        let buckets = [0, 1, 2, 3, 5, 8, 9, 33, 47, 48].map(|n| bucket(n, 48));
        assert_eq!(buckets, [1, 1, 2, 4, 8, 8, 16, 48, 48, 48]);
        assert_eq!(bucket(usize::MAX, 7), 7);
    }

    #[test]
    fn a_split_holds_every_position_and_stays_within_its_memory() {
        for rows in [1, 2, 4, 8, 32, 63, 64, 512] {
            for positions in [1, 255, 256, 257, 1024, 1025, 4096, 131_072] {
                let chunks = attention_chunks(rows, 40, 128, positions, PARTIALS_BYTES);
                if chunks == 0 {
                    assert!(
                        rows >= 64 || rows * positions.div_ceil(CHUNK) * 40 * 130 * 4 > (16 << 20),
                        "{rows} {positions}"
                    );
                } else {
                    assert!(chunks * CHUNK >= positions);
                    assert!((rows * chunks * 40 * 130 * 4) as u64 <= PARTIALS_BYTES);
                }
            }
        }
        assert_eq!(attention_chunks(1, 40, 128, 1, PARTIALS_BYTES), 8);
        assert_eq!(attention_chunks(1, 40, 128, 257, PARTIALS_BYTES), 32);
    }

    #[test]
    fn the_most_that_partials_take_is_enough_for_every_step() {
        for (max_rows, max_context) in [(1, 32), (1, 40_000), (8, 4096), (48, 2048), (512, 1000)] {
            let most = partials_bytes(max_rows, 9, 64, max_context, 4 << 20);
            assert!(most <= 4 << 20);
            for rows in 1..=max_rows {
                for positions in (1..=max_context).step_by(97).chain([max_context]) {
                    let rows = bucket(rows, max_rows);
                    let chunks = attention_chunks(rows, 9, 64, positions, 4 << 20);
                    assert!((rows * chunks * 9 * 66 * 4) as u64 <= most, "{rows} of {max_rows}, {positions}");
                }
            }
        }
    }
}
