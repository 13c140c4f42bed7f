//! A tokenizer from a GGUF file's metadata: the checks that every vocabulary has to pass, and its special tokens.

use std::collections::HashMap;
use std::path::Path;
use std::sync::OnceLock;

use tokenizers::AddedToken;

use super::gguf_vocab::{GgufVocab, token_type};
use super::{Tokenizer, bpe, guarded, sentencepiece};
use crate::chat::ChatTemplate;
use crate::error::{ModelError, Result};

/// Most tokens a vocabulary may have.
const MAX_TOKENS: usize = 1 << 24;

/// A vocabulary whose lists agree with each other.
pub(super) struct Checked<'a> {
    pub path: &'a Path,
    pub vocab: &'a GgufVocab,
    /// Ids by text.
    pub ids: HashMap<&'a str, u32>,
}

/// What a kind of vocabulary makes of it.
pub(super) struct Rules {
    pub inner: tokenizers::Tokenizer,
    pub text: super::dir::TextRule,
}

impl Checked<'_> {
    /// A fault of one metadata key.
    pub fn fault(&self, key: &str, what: String) -> ModelError {
        let tensor = Some(format!("tokenizer.ggml.{key}"));
        ModelError::Format { path: self.path.to_path_buf(), tensor, offset: None, what }
    }

    /// Type of a token; text if the file has no types.
    pub fn token_type(&self, id: usize) -> i32 {
        self.vocab.token_types.get(id).copied().unwrap_or(token_type::NORMAL)
    }
}

pub(super) fn build(path: &Path, vocab: &GgufVocab) -> Result<Tokenizer> {
    let checked = check(path, vocab)?;
    let rules = match vocab.model.as_str() {
        "gpt2" => bpe::rules(&checked)?,
        "llama" => sentencepiece::rules(&checked)?,
        other => {
            return Err(ModelError::Unsupported {
                path: path.to_path_buf(),
                item: Some("tokenizer.ggml.model".into()),
                what: format!(
                    "a vocabulary of kind `{other}`; known are gpt2 (byte-level BPE) and llama (sentencepiece)"
                ),
            });
        }
    };
    let mut inner = rules.inner;
    let added = vocab.tokens.iter().enumerate().filter_map(|(id, text)| match checked.token_type(id) {
        token_type::CONTROL | token_type::UNKNOWN => Some(AddedToken::from(text.clone(), true)),
        token_type::USER_DEFINED => Some(AddedToken::from(text.clone(), false).normalized(false)),
        _ => None,
    });
    guarded(path, "special tokens", || inner.add_tokens(added))?;

    let special = vocab.special();
    let need = |wanted: Option<bool>, id: Option<u32>, key: &str| match (wanted, id) {
        (Some(true), None) => Err(checked.fault(key, "is true, but the file names no such token".into())),
        _ => Ok(()),
    };
    let eos = special.eos.first().copied();
    need(vocab.add_bos, special.bos, "add_bos_token")?;
    need(vocab.add_eos, eos, "add_eos_token")?;
    let suffix = eos.filter(|_| vocab.add_eos == Some(true)).into_iter().collect();
    Ok(Tokenizer {
        pieces: super::dir::pieces(path, &inner, rules.text)?.into(),
        path: path.to_path_buf(),
        inner,
        literal: OnceLock::new(),
        special,
        unk: vocab.unknown(),
        prefix: Vec::new(),
        suffix,
        template: vocab.chat_template.as_ref().map(|source| ChatTemplate::new(path, "default", source)),
    })
}

fn check<'a>(path: &'a Path, vocab: &'a GgufVocab) -> Result<Checked<'a>> {
    let mut checked = Checked { path, vocab, ids: HashMap::with_capacity(vocab.tokens.len().min(MAX_TOKENS)) };
    let n = vocab.tokens.len();
    if n == 0 || n > MAX_TOKENS {
        return Err(checked.fault("tokens", format!("{n} tokens; there must be 1 to {MAX_TOKENS}")));
    }
    for (key, len) in [("token_type", vocab.token_types.len()), ("scores", vocab.scores.len())] {
        if len != 0 && len != n {
            return Err(checked.fault(key, format!("{len} entries for {n} tokens")));
        }
    }
    if let Some(id) = vocab.token_types.iter().position(|t| !(0..=token_type::BYTE).contains(t)) {
        return Err(checked.fault("token_type", format!("token {id} has the unknown type {}", vocab.token_types[id])));
    }
    for (id, text) in (0u32..).zip(&vocab.tokens) {
        if let Some(first) = checked.ids.insert(text, id) {
            return Err(checked.fault("tokens", format!("tokens {first} and {id} are both {text:?}")));
        }
    }
    let named = [
        ("bos_token_id", vocab.bos),
        ("eos_token_id", vocab.eos),
        ("unknown_token_id", vocab.unk),
        ("padding_token_id", vocab.pad),
    ];
    let extra = vocab.extra_eos.iter().map(|&id| ("eot_token_id or eom_token_id", Some(id)));
    for (key, id) in named.into_iter().chain(extra) {
        if let Some(id) = id.filter(|&id| id as usize >= n) {
            return Err(checked.fault(key, format!("token {id} of {n}")));
        }
    }
    Ok(checked)
}
