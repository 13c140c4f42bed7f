//! The vocabulary of a GGUF file as its metadata gives it: what the GGUF reader fills, and a tokenizer is made from.

use super::pre;
use crate::spec::SpecialTokens;

/// Token types of GGUF (`tokenizer.ggml.token_type`).
pub mod token_type {
    /// Text.
    pub const NORMAL: i32 = 1;
    /// Stands for text that no other token covers.
    pub const UNKNOWN: i32 = 2;
    /// Steers the model and is no text: parsed as a whole, left out of decoded text on request.
    pub const CONTROL: i32 = 3;
    /// Text added to the vocabulary by its user: parsed as a whole, always part of decoded text.
    pub const USER_DEFINED: i32 = 4;
    /// A placeholder that is never produced.
    pub const UNUSED: i32 = 5;
    /// One byte, written `<0xNN>`.
    pub const BYTE: i32 = 6;
}

/// Metadata `tokenizer.ggml.*` and `tokenizer.chat_template` of a GGUF file, unchecked.
/// [`Tokenizer::from_gguf`](super::Tokenizer::from_gguf) checks it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufVocab {
    /// `tokenizer.ggml.model`: `gpt2` (byte-level BPE) or `llama` (sentencepiece BPE).
    pub model: String,
    /// `tokenizer.ggml.pre`: name of the rules that split text before BPE.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`: token texts by id.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.token_type`: see [`token_type`], one a token; empty if the file has none.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.scores`: one a token; empty if the file has none.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.merges`: `left right`, the strongest first; empty if the file has none.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u32>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unk: Option<u32>,
    /// `tokenizer.ggml.padding_token_id`.
    pub pad: Option<u32>,
    /// Further tokens that end a generation: `tokenizer.ggml.eot_token_id`, `tokenizer.ggml.eom_token_id`, in that order.
    pub extra_eos: Vec<u32>,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`.
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`.
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.chat_template`.
    pub chat_template: Option<String>,
}

impl GgufVocab {
    /// What a generation needs to know of the special tokens: what the file says, or else what is usual for its kind of
    /// vocabulary. Each end token once, `eos` first. Ids are as the file gives them, in range or not.
    pub fn special(&self) -> SpecialTokens {
        let bos = self.bos.or(self.usual(1, token_type::CONTROL));
        let mut eos = Vec::new();
        let first = self.eos.or(self.usual(2, token_type::CONTROL));
        for id in first.into_iter().chain(self.extra_eos.iter().copied()) {
            if !eos.contains(&id) {
                eos.push(id);
            }
        }
        SpecialTokens { bos, eos, pad: self.pad, add_bos: bos.is_some() && self.add_bos.unwrap_or(self.usually_bos()) }
    }

    /// True if the file has no vocabulary: no tokens, and no claim to have any.
    pub fn is_absent(&self) -> bool {
        self.tokens.is_empty() && matches!(self.model.as_str(), "" | "none" | "no_vocab")
    }

    /// The token that stands for text that no other covers.
    pub(crate) fn unknown(&self) -> Option<u32> {
        self.unk.or(self.usual(0, token_type::UNKNOWN))
    }

    /// A sentencepiece vocabulary has its special tokens in fixed places unless the file says otherwise.
    fn usual(&self, id: u32, kind: i32) -> Option<u32> {
        let there = (id as usize) < self.tokens.len() && self.token_types.get(id as usize) == Some(&kind);
        (self.model == "llama" && there).then_some(id)
    }

    /// True if a prompt starts with `bos` when the file does not say.
    fn usually_bos(&self) -> bool {
        match self.model.as_str() {
            "llama" => true,
            "gpt2" => self.pre.as_deref().and_then(pre::by_name).is_some_and(|rules| rules.add_bos),
            _ => false,
        }
    }
}
