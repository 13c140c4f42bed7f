//! Byte-level BPE from a GGUF file's tokens and merges (`tokenizer.ggml.model` is `gpt2`).

use std::collections::HashSet;

use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizerWrapper, SplitDelimiterBehavior};

use super::dir::TextRule;
use super::from_gguf::{Checked, Rules};
use super::{guarded, pre};
use crate::error::{ModelError, Result};

pub(super) fn rules(checked: &Checked) -> Result<Rules> {
    let name = checked.vocab.pre.as_deref().unwrap_or_else(|| {
        log::warn!("{}: no `tokenizer.ggml.pre`; text is split by the rules called `default`", checked.path.display());
        "default"
    });
    let pre = pre::by_name(name).ok_or_else(|| ModelError::Unsupported {
        path: checked.path.to_path_buf(),
        item: Some("tokenizer.ggml.pre".into()),
        what: format!("no rules called `{name}` to split text by; known are {}", pre::KNOWN),
    })?;
    let merges = merges(checked)?;
    let vocab: Vocab = checked.ids.iter().map(|(text, id)| (text.to_string(), *id)).collect();
    let inner = guarded(checked.path, "vocabulary", || {
        let model = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(pre.whole_words).build()?;
        let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
        for pattern in pre.splits {
            let pattern = SplitPattern::Regex((*pattern).into());
            steps.push(Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into());
        }
        steps.push(ByteLevel::new(false, false, false).into());
        let mut inner = tokenizers::Tokenizer::new(model);
        inner.with_normalizer(pre.nfc.then_some(NormalizerWrapper::NFC(NFC)))?;
        inner.with_pre_tokenizer(Some(Sequence::new(steps)));
        Ok(inner)
    })?;
    Ok(Rules { inner, text: TextRule::ByteLevel })
}

/// The merges, each once. One whose result is no token can't lead to one and is left out.
fn merges(checked: &Checked) -> Result<Vec<(String, String)>> {
    let mut seen = HashSet::with_capacity(checked.vocab.merges.len());
    let mut merges = Vec::with_capacity(checked.vocab.merges.len());
    let mut text = String::new();
    for (rank, merge) in checked.vocab.merges.iter().enumerate() {
        let fault = |what: &str| checked.fault("merges", format!("merge {rank}, {merge:?}, {what}"));
        // A token may start with a space, so the one between the two is looked for after the first character.
        let first = merge.chars().next().map_or(0, char::len_utf8);
        let space = merge.get(first..).and_then(|rest| rest.find(' ')).ok_or_else(|| fault("is not two tokens"))?;
        let (left, right) = (&merge[..first + space], &merge[first + space + 1..]);
        for part in [left, right] {
            if !checked.ids.contains_key(part) {
                return Err(fault(&format!("names {part:?}, which is no token")));
            }
        }
        text.clear();
        text.push_str(left);
        text.push_str(right);
        if checked.ids.contains_key(text.as_str()) && seen.insert((left, right)) {
            merges.push((left.to_string(), right.to_string()));
        }
    }
    Ok(merges)
}
