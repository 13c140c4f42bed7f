//! Which tensors are pinned: by name or pattern, and by size.

use headrace_model::ModelSpec;
use headrace_model::spec::TensorId;
use wildmatch::WildMatch;

use crate::error::{EngineError, Result};
use crate::layout::PieceLayout;
use crate::program::linear_tensors;

/// For each piece of `layout`, whether it belongs to a pinned tensor: one whose name matches one of `patterns` (`*` and `?` as
/// in a shell), or of at most `threshold` bytes.
///
/// # Errors
/// [`EngineError::Argument`] for a pattern that matches no tensor which a step reads whole: nothing would be pinned, and
/// nobody would know.
pub fn pinned_pieces(
    model: &ModelSpec,
    layout: &PieceLayout,
    patterns: &[String],
    threshold: u64,
) -> Result<Vec<bool>> {
    let tensors = linear_tensors(model);
    let mut pinned = vec![false; model.tensors.len()];
    for pattern in patterns {
        let matcher = WildMatch::new(pattern);
        let mut matches = 0;
        for &TensorId(t) in tensors.iter().filter(|&&t| matcher.matches(&model.tensor(t).name)) {
            pinned[t] = true;
            matches += 1;
        }
        if matches == 0 {
            let what = "matches no matrix of a linear layer; `headrace plan MODEL --tensors` lists the names";
            return Err(EngineError::argument("pinned", pattern, what));
        }
    }
    for &t in &tensors {
        pinned[t.0] |= model.tensor(t).bytes() as u64 <= threshold;
    }
    Ok(layout.pieces.iter().map(|p| p.runs.iter().any(|r| pinned[r.tensor.0])).collect())
}
