//! Sentencepiece BPE from a GGUF file's tokens and scores (`tokenizer.ggml.model` is `llama`).

use tokenizers::NormalizerWrapper;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::prepend::Prepend;
use tokenizers::normalizers::replace::Replace;
use tokenizers::normalizers::utils::Sequence;

use super::dir::TextRule;
use super::from_gguf::{Checked, Rules};
use super::gguf_vocab::token_type;
use super::guarded;
use super::pieces::{SPACE_MARK, fallback_byte};
use crate::error::Result;

/// Longest token that merging may make, in bytes.
const MAX_TOKEN: usize = 512;

pub(super) fn rules(checked: &Checked) -> Result<Rules> {
    let merges = merges(checked)?;
    let tokens = &checked.vocab.tokens;
    let bytes = tokens
        .iter()
        .enumerate()
        .filter(|(id, text)| checked.token_type(*id) == token_type::BYTE && fallback_byte(text).is_some());
    let byte_fallback = match bytes.count() {
        0 => false,
        256 => true,
        n => return Err(checked.fault("token_type", format!("{n} of 256 byte tokens"))),
    };
    let unk = checked.vocab.unknown().and_then(|id| tokens.get(id as usize)).cloned();
    if !byte_fallback && unk.is_none() {
        let what = "neither byte tokens nor an unknown token for text that no token covers".into();
        return Err(checked.fault("tokens", what));
    }
    let vocab: Vocab = checked.ids.iter().map(|(text, id)| (text.to_string(), *id)).collect();
    let prefix = checked.vocab.add_space_prefix.unwrap_or(true);
    let inner = guarded(checked.path, "vocabulary", || {
        let mut model = BPE::builder().vocab_and_merges(vocab, merges).fuse_unk(true).byte_fallback(byte_fallback);
        if let Some(unk) = unk {
            model = model.unk_token(unk);
        }
        let mut steps = Vec::new();
        if prefix {
            steps.push(NormalizerWrapper::Prepend(Prepend::new(SPACE_MARK.into())));
        }
        steps.push(NormalizerWrapper::Replace(Replace::new(" ", SPACE_MARK)?));
        let mut inner = tokenizers::Tokenizer::new(model.build()?);
        inner.with_normalizer(Some(NormalizerWrapper::Sequence(Sequence::new(steps))))?;
        Ok(inner)
    })?;
    Ok(Rules { inner, text: TextRule::Sentencepiece { lead: usize::from(prefix) } })
}

/// Every way to put a token together from two, the token of the highest score first: what the scores say about merging,
/// as BPE writes it.
fn merges(checked: &Checked) -> Result<Vec<(String, String)>> {
    let (tokens, scores) = (&checked.vocab.tokens, &checked.vocab.scores);
    if scores.len() != tokens.len() {
        return Err(checked.fault("scores", format!("{} entries for {} tokens", scores.len(), tokens.len())));
    }
    if let Some(id) = scores.iter().position(|s| s.is_nan()) {
        return Err(checked.fault("scores", format!("the score of token {id} is not a number")));
    }
    let text = |id: usize| matches!(checked.token_type(id), token_type::NORMAL | token_type::USER_DEFINED);
    let mut order: Vec<usize> = (0..tokens.len()).filter(|&id| text(id)).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    let mut merges = Vec::new();
    for id in order {
        let token = &tokens[id];
        if token.len() > MAX_TOKEN {
            return Err(
                checked.fault("tokens", format!("token {id} is {} bytes long; at most {MAX_TOKEN}", token.len()))
            );
        }
        let is_text = |part: &str| checked.ids.get(part).is_some_and(|&id| text(id as usize));
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if is_text(left) && is_text(right) {
                merges.push((left.to_string(), right.to_string()));
            }
        }
    }
    Ok(merges)
}
