//! The greedy choice: a total order over logits, and an error for anything non-finite.

/// Index of the largest logit; of equal ones the lowest index. `Err(index)` names the first non-finite logit;
/// `Err(0)` an empty slice.
pub fn argmax(logits: &[f32]) -> Result<usize, usize> {
    if let Some(bad) = logits.iter().position(|x| !x.is_finite()) {
        return Err(bad);
    }
    let mut best = 0;
    for (i, &x) in logits.iter().enumerate().skip(1) {
        if x > logits[best] {
            best = i;
        }
    }
    if logits.is_empty() { Err(0) } else { Ok(best) }
}
