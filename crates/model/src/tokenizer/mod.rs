//! Text to token ids and back, with the vocabulary that comes with a model: a `tokenizer.json`, or a GGUF file's metadata.

mod bpe;
mod chat;
mod dir;
mod from_gguf;
pub mod gguf_vocab;
mod pieces;
mod pre;
mod sentencepiece;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

pub use gguf_vocab::GgufVocab;
pub use pieces::DecodeStream;

use crate::chat::ChatTemplate;
use crate::error::{ModelError, Result};
use crate::spec::SpecialTokens;
use pieces::{Kind, Pieces};

/// A model's vocabulary, and the rules by which text becomes token ids.
pub struct Tokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
    /// The same without a search for control tokens; made when it is needed first.
    literal: OnceLock<Box<tokenizers::Tokenizer>>,
    pieces: Arc<Pieces>,
    special: SpecialTokens,
    unk: Option<u32>,
    /// Put before a text after `bos`.
    prefix: Vec<u32>,
    /// Put after a text.
    suffix: Vec<u32>,
    template: Option<ChatTemplate>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("path", &self.path)
            .field("vocab_size", &self.vocab_size())
            .field("special", &self.special)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a model directory, and what is there of `tokenizer_config.json`,
    /// `special_tokens_map.json` and `chat_template.jinja`.
    ///
    /// # Errors
    /// `Io` if a file can't be read; `Format` if one is broken; `Unsupported` for other models than BPE, and for decoders
    /// other than byte-level and sentencepiece ones.
    pub fn from_dir(dir: &Path) -> Result<Tokenizer> {
        dir::load(dir)
    }

    /// Makes the tokenizer that a GGUF file's metadata describes; `path` is that file, for messages.
    ///
    /// # Errors
    /// `Format` for a vocabulary that contradicts itself; `Unsupported` for other models than `gpt2` and `llama`, and for
    /// an unknown `tokenizer.ggml.pre`.
    pub fn from_gguf(path: &Path, vocab: &GgufVocab) -> Result<Tokenizer> {
        from_gguf::build(path, vocab)
    }

    /// Takes the special ids that another file of the model gives: its `bos` and `pad` replace those known so far, its `eos`
    /// come before them.
    ///
    /// # Errors
    /// `Format` if an id is not in the vocabulary.
    pub fn with_special_ids(mut self, bos: Option<u32>, eos: &[u32], pad: Option<u32>) -> Result<Tokenizer> {
        for &id in bos.iter().chain(eos).chain(&pad) {
            self.check_id(id)?;
        }
        self.special.bos = bos.or(self.special.bos);
        self.special.pad = pad.or(self.special.pad);
        let own = std::mem::take(&mut self.special.eos);
        for &id in eos.iter().chain(&own) {
            if !self.special.eos.contains(&id) {
                self.special.eos.push(id);
            }
        }
        Ok(self)
    }

    /// Replaces the tokens that end a generation.
    pub(crate) fn set_eos(&mut self, eos: &[u32]) {
        self.special.eos = eos.to_vec();
    }

    /// The id of a token that text is searched for as a whole, control token or not.
    pub(crate) fn added_token(&self, token: &str) -> Option<u32> {
        let id = self.inner.token_to_id(token)?;
        self.inner.get_added_vocabulary().get_added_tokens_decoder().contains_key(&id).then_some(id)
    }

    /// The ids of a text. Control tokens in the text are parsed if `parse_special`, else they are plain text; tokens that were
    /// added to the vocabulary as text are always parsed. With `add_special` the ids start with `bos` if
    /// [`SpecialTokens::add_bos`] says so and the text doesn't start with it already, and carry whatever else the model's
    /// tokenizer puts around a text.
    ///
    /// # Errors
    /// `Format` if the vocabulary's own rules fail on the text; `Unsupported` if they make control tokens of plain text.
    pub fn encode_with(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<u32>> {
        let ids = if parse_special { self.parsed(text)? } else { self.literal(text)? };
        if !add_special {
            return Ok(ids);
        }
        let starts = |bos: &u32| self.special.add_bos && ids.first() != Some(bos);
        let bos = self.special.bos.filter(starts);
        Ok(bos.iter().chain(&self.prefix).chain(&ids).chain(&self.suffix).copied().collect())
    }

    /// The ids of a text, control tokens in it parsed; see [`Tokenizer::encode_with`].
    ///
    /// # Errors
    /// As [`Tokenizer::encode_with`].
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        self.encode_with(text, add_special, true)
    }

    /// The ids of a text in which control tokens are parsed.
    fn parsed(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = guarded(&self.path, "encoding failed", || self.inner.encode_fast(text, false))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The ids of a text in which control tokens are plain text.
    fn literal(&self, text: &str) -> Result<Vec<u32>> {
        let ids = self.parsed(text)?;
        if !ids.iter().any(|id| self.is_control(*id)) {
            return Ok(ids);
        }
        let literal = self.literal.get_or_init(|| {
            let mut literal = self.inner.clone();
            literal.set_encode_special_tokens(true);
            Box::new(literal)
        });
        let encoding = guarded(&self.path, "encoding failed", || literal.encode_fast(text, false))?;
        match encoding.get_ids().iter().find(|id| self.is_control(**id) && Some(**id) != self.unk) {
            None => Ok(encoding.get_ids().to_vec()),
            Some(&id) => Err(ModelError::Unsupported {
                path: self.path.clone(),
                item: self.id_to_token(id),
                what: "the vocabulary's own rules make this control token of plain text".into(),
            }),
        }
    }

    /// The text of token ids, without special tokens if `skip_special`. Bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// `Format` if an id is not in the vocabulary.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let mut stream = self.decode_stream(skip_special);
        let mut text = String::new();
        for &id in ids {
            self.check_id(id)?;
            stream.push_to(id, &mut text);
        }
        stream.finish_to(&mut text);
        Ok(text)
    }

    /// Starts a text that comes token by token.
    pub fn decode_stream(&self, skip_special: bool) -> DecodeStream {
        DecodeStream::new(self.pieces.clone(), skip_special)
    }

    /// The id of a token, written as the vocabulary writes it.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// A token as the vocabulary writes it.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// One more than the largest id. A model may have more rows than that.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// The special tokens that the model's files name.
    pub fn special(&self) -> &SpecialTokens {
        &self.special
    }

    fn check_id(&self, id: u32) -> Result<()> {
        if self.pieces.kind(id) != Kind::Absent {
            return Ok(());
        }
        let what = format!("token id {id} is not in the vocabulary of {} ids", self.vocab_size());
        Err(ModelError::Format { path: self.path.clone(), tensor: None, offset: None, what })
    }
}

/// Runs the tokenizer library on what a file says. It is not made for hostile files: a panic there is a fault of the
/// file as well.
fn guarded<T>(path: &Path, action: &str, run: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    let what = match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(e)) => format!("{action}: {e}"),
        Err(_) => format!("{action}: the vocabulary contradicts itself"),
    };
    Err(ModelError::Format { path: path.to_path_buf(), tensor: None, offset: None, what })
}
