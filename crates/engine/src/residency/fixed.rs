//! The best fixed set: the pieces of most bytes that fit. No policy can do better over steps that read the same order.
//!
//! Why: a piece that is hit in a step was resident when the step began, or it would have been copied in it. So the hits of one
//! step are a set that was held at one moment, and no such set has more bytes than the largest that fits.

use crate::layout::PieceLayout;
use crate::placement::{Placement, cold_order};
use crate::residency::policy::{Decision, PolicyKind, ResidencyPolicy};
use crate::residency::resident::ResidentSet;

/// Most entries of the table of sums. Beyond, sizes are rounded up to a coarser unit, and the set may be a little short.
const MOST_SUMS: u64 = 1 << 20;

/// See [`PolicyKind::Static`].
#[derive(Debug)]
pub(crate) struct Static;

impl ResidencyPolicy for Static {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Static
    }

    fn order(&self, set: &ResidentSet) -> Vec<usize> {
        set.evictable()
    }

    fn admit(&self, _set: &ResidentSet, _piece: usize) -> Decision {
        Decision::Bypass
    }

    /// What is to be reserved, the most wanted first: the static schedule's placement or the best set by bytes, whichever keeps
    /// more once granules are shared with others; then everything else, of which the resident set takes what still fits.
    fn fixed_set(&self, set: &ResidentSet) -> Vec<usize> {
        let free: Vec<usize> = spread(set.layout()).into_iter().filter(|&p| !set.is_reserved(p)).collect();
        let candidates = [scheduled(set, &free), most_bytes(set, &free)].map(|first| {
            let mut order: Vec<usize> = free.iter().copied().filter(|&p| first[p]).collect();
            order.extend(free.iter().copied().filter(|&p| !first[p]));
            order
        });
        candidates.into_iter().max_by_key(|order| set.reserving(order)).unwrap_or_default()
    }
}

/// The pieces that the static schedule would keep with the same granules.
fn scheduled(set: &ResidentSet, free: &[usize]) -> Vec<bool> {
    let mut first = vec![false; set.layout().pieces.len()];
    if let Some(schedule) = set.schedule() {
        let placement = Placement::within(schedule, set.granule(), set.limits().capacity);
        for &piece in free {
            let address = set.layout().pieces[piece].address;
            let around = schedule.pieces.partition_point(|p| p.address <= address);
            first[piece] = around > 0 && placement.resident[around - 1];
        }
    }
    first
}

/// The pieces of most bytes within the budget.
fn most_bytes(set: &ResidentSet, free: &[usize]) -> Vec<bool> {
    let pieces = set.layout().pieces.len();
    let taken: u64 = (0..pieces).filter(|&p| set.is_reserved(p)).map(|p| set.bytes(p)).sum();
    let budget = set.limits().budget.min(set.limits().capacity).saturating_sub(taken);
    let sizes: Vec<u64> = free.iter().map(|&p| set.bytes(p)).collect();
    let mut first = vec![false; pieces];
    largest_sum(&sizes, budget).chosen.into_iter().for_each(|i| first[free[i]] = true);
    first
}

/// Pieces in the order in which they are best kept: the reverse of that in which they become cold, which is spread evenly over
/// the read order at every length.
fn spread(layout: &PieceLayout) -> Vec<usize> {
    let mut order = cold_order(layout.pieces.len());
    order.reverse();
    order
}

/// A choice of sizes.
pub(crate) struct Sum {
    /// Indices of the sizes chosen.
    pub(crate) chosen: Vec<usize>,
    /// Their sum.
    pub(crate) sum: u64,
    /// True if no choice has a larger sum within the budget.
    pub(crate) exact: bool,
}

/// The choice of `sizes` with the largest sum that is at most `budget`; earlier ones of equal sizes are chosen first.
pub(crate) fn largest_sum(sizes: &[u64], budget: u64) -> Sum {
    let total: u64 = sizes.iter().sum();
    if total <= budget {
        return Sum { chosen: (0..sizes.len()).collect(), sum: total, exact: true };
    }
    let divisor = sizes.iter().fold(0, |a, &b| gcd(a, b)).max(1);
    // In whole multiples of the divisor, so that a coarser unit rounds as little as it can.
    let unit = divisor * (budget / divisor).div_ceil(MOST_SUMS).max(1);
    let most = (budget / unit) as usize;
    let groups = bundles(sizes);
    // For each reachable sum, the bundle that reached it first; bundles before it made the rest of that sum.
    let mut reached_by = vec![u32::MAX; most + 1];
    let mut reachable = vec![false; most + 1];
    reachable[0] = true;
    for (g, (members, bytes)) in groups.iter().enumerate() {
        // Each size is rounded up for itself, so that the bundle's true bytes never exceed its units.
        let units = (bytes / members.len() as u64).div_ceil(unit) as usize * members.len();
        for sum in (units..=most).rev() {
            if units > 0 && !reachable[sum] && reachable[sum - units] {
                reachable[sum] = true;
                reached_by[sum] = g as u32;
            }
        }
    }
    let mut at = (0..=most).rev().find(|&s| reachable[s]).unwrap_or(0);
    let mut chosen = Vec::new();
    while at > 0 {
        let (members, bytes) = &groups[reached_by[at] as usize];
        at -= (bytes / members.len() as u64).div_ceil(unit) as usize * members.len();
        chosen.extend(members);
    }
    chosen.sort();
    let sum = chosen.iter().map(|&i| sizes[i]).sum();
    Sum { chosen, sum, exact: unit == divisor }
}

/// Bundles of equal sizes, of 1, 2, 4 ... members and a rest, so that any number of them is a sum of bundles: members and
/// their bytes. Larger bundles hold the members that come first.
fn bundles(sizes: &[u64]) -> Vec<(Vec<usize>, u64)> {
    let mut by_size: std::collections::BTreeMap<u64, Vec<usize>> = std::collections::BTreeMap::new();
    sizes.iter().enumerate().for_each(|(i, &s)| by_size.entry(s).or_default().push(i));
    let mut out = Vec::new();
    for (size, members) in by_size {
        let mut counts = Vec::new();
        let (mut left, mut count) = (members.len(), 1);
        while left > 0 {
            let take = count.min(left);
            counts.push(take);
            left -= take;
            count *= 2;
        }
        counts.sort_by_key(|&c| std::cmp::Reverse(c));
        let mut members = members.into_iter();
        for count in counts {
            let bundle: Vec<usize> = members.by_ref().take(count).collect();
            out.push((bundle, size * count as u64));
        }
    }
    out
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
