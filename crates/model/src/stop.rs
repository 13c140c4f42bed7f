//! Which tokens end a generation: those that any file of the model names, and control tokens known to end a turn.
//!
//! Files often name one token where the chat template ends turns with another, or none at all. A model that is not stopped
//! there goes on with a turn that isn't its own, so every source counts and the result is their union.

use std::path::Path;

use serde_json::Value;

use crate::error::{ModelError, Result};
use crate::file::read_small;
use crate::spec::ModelSpec;
use crate::tokenizer::Tokenizer;

/// Largest `generation_config.json`, bytes.
const MAX_CONFIG: u64 = 1 << 20;

/// Control tokens that end a turn or a text wherever a vocabulary has them.
const END_TOKENS: [&str; 17] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
    "[EOT]",
];

/// Puts the union of all end tokens into `spec` and `tokenizer`, the file's own first, and warns if there is none. `dir` is
/// the model's directory, where `generation_config.json` may lie; `None` for a single file. `path` is for messages.
///
/// # Errors
/// `Format` if `generation_config.json` is broken or names a token that the model doesn't have.
pub(crate) fn gather(
    path: &Path,
    dir: Option<&Path>,
    spec: &mut ModelSpec,
    tokenizer: Option<&mut Tokenizer>,
) -> Result<()> {
    let mut ids = spec.special.eos.clone();
    if let Some(dir) = dir {
        ids.extend(generation_config(&dir.join("generation_config.json"), spec.config.vocab)?);
    }
    if let Some(tokenizer) = &tokenizer {
        ids.extend(&tokenizer.special().eos);
        ids.extend(known(tokenizer));
    }
    let mut union: Vec<u32> = Vec::new();
    for id in ids {
        // A vocabulary may be larger than the model: such a token never comes out.
        if (id as usize) < spec.config.vocab && !union.contains(&id) {
            union.push(id);
        }
    }
    if union.is_empty() {
        log::warn!(
            "{}: no file names a token that ends a generation, and the vocabulary has none that is known: generations go on \
             to max_new_tokens or the end of the context unless they are given stop_tokens",
            path.display()
        );
    }
    if let Some(tokenizer) = tokenizer {
        tokenizer.set_eos(&union);
    }
    spec.special.eos = union;
    Ok(())
}

/// The known end tokens among the control tokens of a vocabulary.
fn known(tokenizer: &Tokenizer) -> Vec<u32> {
    let has = |token: &str| tokenizer.added_token(token);
    // Where messages end with `<|end|>` but turns with one of these, `<|end|>` is in the middle of a turn.
    let turns = has("<|return|>").is_some() && has("<|call|>").is_some();
    END_TOKENS.iter().filter(|token| !(turns && **token == "<|end|>")).filter_map(|token| has(token)).collect()
}

/// `eos_token_id` of a `generation_config.json`: a number, a list, or null; nothing if the file is absent.
fn generation_config(path: &Path, vocab: usize) -> Result<Vec<u32>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let fault = |key: Option<&str>, what: String| ModelError::Format {
        path: path.to_path_buf(),
        tensor: key.map(Into::into),
        offset: None,
        what,
    };
    let value: Value =
        serde_json::from_slice(&read_small(path, MAX_CONFIG)?).map_err(|e| fault(None, e.to_string()))?;
    let listed = match value.get("eos_token_id") {
        None => &[],
        Some(Value::Array(list)) => list.as_slice(),
        Some(one) => std::slice::from_ref(one),
    };
    let mut ids = Vec::new();
    for value in listed.iter().filter(|v| !v.is_null() && v.as_i64() != Some(-1)) {
        let id = value.as_u64().filter(|id| *id < vocab as u64);
        let what = || format!("{value}: must be a token id below {vocab}, a list of them, or null");
        ids.push(id.ok_or_else(|| fault(Some("eos_token_id"), what()))? as u32);
    }
    Ok(ids)
}
