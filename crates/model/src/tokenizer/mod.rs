//! Text to token ids and back, with the vocabulary that comes with a model: a `tokenizer.json`, or a GGUF file's metadata.

mod bpe;
mod dir;
mod from_gguf;
pub mod gguf_vocab;
mod pieces;
mod pre;
mod sentencepiece;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use gguf_vocab::GgufVocab;
pub use pieces::DecodeStream;

use crate::chat::{ChatMessage, ChatTemplate, TemplateTokens};
use crate::error::{ModelError, Result};
use crate::spec::SpecialTokens;
use pieces::{Kind, Pieces};

/// A model's vocabulary, and the rules by which text becomes token ids.
pub struct Tokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
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

    /// Replaces the special ids by those that another file of the model gives; an empty or absent one changes nothing.
    ///
    /// # Errors
    /// `Format` if an id is not in the vocabulary.
    pub fn with_special_ids(mut self, bos: Option<u32>, eos: &[u32], pad: Option<u32>) -> Result<Tokenizer> {
        for &id in bos.iter().chain(eos).chain(&pad) {
            self.check_id(id)?;
        }
        self.special.bos = bos.or(self.special.bos);
        self.special.pad = pad.or(self.special.pad);
        if !eos.is_empty() {
            self.special.eos = eos.to_vec();
        }
        Ok(self)
    }

    /// The ids of a text. Special tokens in the text are parsed. With `add_special` the ids start with `bos` if
    /// [`SpecialTokens::add_bos`] says so, and carry whatever else the model's tokenizer puts around a text; leave it
    /// out for text that a chat template made.
    ///
    /// # Errors
    /// `Format` if the vocabulary's own rules fail on the text.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let encoding = guarded(&self.path, "encoding failed", || self.inner.encode_fast(text, false))?;
        if !add_special {
            return Ok(encoding.get_ids().to_vec());
        }
        let bos = self.special.bos.filter(|_| self.special.add_bos);
        Ok(bos.iter().chain(&self.prefix).chain(encoding.get_ids()).chain(&self.suffix).copied().collect())
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

    /// True if the model comes with a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// The text of a conversation as the model expects it; with `add_generation_prompt` it ends where the model's
    /// answer starts. Encode it with `add_special = false`: a template writes its own `bos`.
    ///
    /// # Errors
    /// `Unsupported` if the model has no template; `Template` if the template fails or refuses the messages.
    pub fn apply_chat_template(&self, messages: &[ChatMessage], add_generation_prompt: bool) -> Result<String> {
        let template = self.template.as_ref().ok_or_else(|| ModelError::Unsupported {
            path: self.path.clone(),
            item: Some("chat_template".into()),
            what: "the model has no chat template; give it a plain prompt".into(),
        })?;
        let token = |id: Option<u32>| id.and_then(|id| self.id_to_token(id));
        let tokens = TemplateTokens {
            bos: token(self.special.bos),
            eos: token(self.special.eos.first().copied()),
            pad: token(self.special.pad),
            unk: token(self.unk),
        };
        template.render(messages, add_generation_prompt, &tokens)
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
