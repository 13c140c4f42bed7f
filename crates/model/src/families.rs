//! What each architecture requires beyond the weights that every decoder has: biases and norms of heads, as data.
//!
//! Every decoder has an embedding, a final norm, and in each layer two norms and the matrices of `q`, `k`, `v`, `o`, `gate`,
//! `up` and `down`; the readers ask for those by themselves. A bias or norm that is absent can't be told from a weight that
//! the file lost, unless it is written down which architecture has it. That is done here.

use std::path::Path;

use crate::error::{ModelError, Result};
use crate::spec::{Layer, Linear, ModelSpec, Tensor, TensorId};

/// Whether an optional part of a layer must be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// In every layer.
    Required,
    /// In every layer or in none: files of this architecture exist with and without it.
    AllOrNone,
}

/// What an architecture requires of its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    /// Name in files: `general.architecture` of GGUF, `model.type` of `genai_config.json`.
    pub arch: &'static str,
    /// Biases of `q`, `k` and `v`, all three or one of the matrix that holds them all.
    pub qkv_bias: Presence,
    /// Bias of `o`.
    pub o_bias: Presence,
    /// Biases of `gate`, `up` and `down`.
    pub ffn_bias: Presence,
    /// Norms over each head of queries and of keys.
    pub head_norms: Presence,
}

/// Every architecture that is supported.
pub const FAMILIES: [Family; 4] = {
    use Presence::{AllOrNone, Required};
    let plain =
        Family { arch: "llama", qkv_bias: AllOrNone, o_bias: AllOrNone, ffn_bias: AllOrNone, head_norms: AllOrNone };
    [
        plain,
        Family { arch: "mistral", ..plain },
        Family { arch: "qwen2", qkv_bias: Required, ..plain },
        Family { arch: "qwen3", head_norms: Required, ..plain },
    ]
};

/// Checks that `spec` has what its architecture requires. `path` is its file, for messages.
///
/// # Errors
/// `Format` naming the first tensor that is missing: one that the architecture requires, or one that other layers have.
pub(crate) fn check(path: &Path, spec: &ModelSpec) -> Result<()> {
    let Some(family) = FAMILIES.iter().find(|f| f.arch == spec.config.arch) else { return Ok(()) };
    type Part = fn(&Layer) -> Vec<Linear>;
    let biases: [(Presence, Part); 3] = [
        (family.qkv_bias, |l| l.qkv.clone()),
        (family.o_bias, |l| vec![l.o]),
        (family.ffn_bias, |l| l.gate_up.iter().copied().chain([l.down]).collect()),
    ];
    for (presence, part) in biases {
        let linears: Vec<Linear> = spec.layers.iter().flat_map(part).collect();
        let with = linears.iter().find(|l| l.bias.is_some());
        if let Some(lacking) = linears.iter().find(|l| l.bias.is_none()) {
            let name = bias_name(spec.tensor(lacking.weight));
            let other = with.and_then(|l| l.bias).map(|id| spec.tensor(id));
            require(path, family, presence, name, other)?;
        }
    }
    type Norm = fn(&Layer) -> Option<TensorId>;
    let norms: [(&str, Norm); 2] = [("q_norm", |l| l.q_norm), ("k_norm", |l| l.k_norm)];
    let present = |norm: Norm| spec.layers.iter().find_map(norm);
    let any = norms.iter().find_map(|(_, norm)| present(*norm)).map(|id| spec.tensor(id));
    for (name, norm) in norms {
        if let Some(index) = spec.layers.iter().position(|l| norm(l).is_none()) {
            require(path, family, family.head_norms, format!("{name} of layer {index}"), any)?;
        }
    }
    Ok(())
}

/// An error for the tensor `name`, which isn't there, if it must be: `other` is one of its kind that is.
fn require(path: &Path, family: &Family, presence: Presence, name: String, other: Option<&Tensor>) -> Result<()> {
    let what = match (presence, other) {
        (Presence::Required, _) => format!("tensor missing: every layer of a {} model has it", family.arch),
        (Presence::AllOrNone, Some(other)) => format!("tensor missing: the file has {} and so needs this", other.name),
        (Presence::AllOrNone, None) => return Ok(()),
    };
    let what = format!("{what}; the file is incomplete, convert or fetch it again");
    Err(ModelError::Format { path: path.to_path_buf(), tensor: Some(name), offset: None, what })
}

/// What the bias of the layer with this weight is called.
fn bias_name(weight: &Tensor) -> String {
    match weight.name.strip_suffix(".weight") {
        Some(stem) => format!("{stem}.bias"),
        None => format!("bias of {}", weight.name),
    }
}
