//! The two shapes in which the contract adds floats up: lanes, then a halving tree.

/// Adds the lanes up in place as a halving tree: lane `i` takes lane `i + n/2`, then `n/4`, down to lane 0.
///
/// `lanes.len()` must be a power of two. For eight lanes this is `(0+4, 1+5, 2+6, 3+7)`, `(0+2, 1+3)`, `(0+1)`.
pub fn tree(lanes: &mut [f32]) -> f32 {
    debug_assert!(lanes.len().is_power_of_two());
    let mut n = lanes.len();
    while n > 1 {
        n /= 2;
        for i in 0..n {
            lanes[i] += lanes[i + n];
        }
    }
    lanes[0]
}

/// Dot product with `LANES` lanes: element `i` goes to lane `i % LANES` by `fma` in increasing order, then [`tree`].
pub fn dot_lanes<const LANES: usize>(a: impl Iterator<Item = f32>, b: impl Iterator<Item = f32>) -> f32 {
    let mut lanes = [0f32; LANES];
    for (i, (x, y)) in a.zip(b).enumerate() {
        lanes[i % LANES] = x.mul_add(y, lanes[i % LANES]);
    }
    tree(&mut lanes)
}
