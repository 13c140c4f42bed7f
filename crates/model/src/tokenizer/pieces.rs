//! Token ids to text: the bytes of every token, and UTF-8 put together from them, at once or piece by piece.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

/// What an id stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Kind {
    /// No token has this id.
    #[default]
    Absent,
    /// Part of the text.
    Text,
    /// A special token: left out on request.
    Special,
}

/// The bytes that every token stands for.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    /// Bytes of all tokens, one after the other.
    bytes: Vec<u8>,
    /// `[vocab + 1]`: where each token's bytes start.
    starts: Vec<usize>,
    /// `[vocab]`.
    kinds: Vec<Kind>,
    /// Spaces taken off the front of a decoded text: the mark that sentencepiece puts before it.
    lead: usize,
}

impl Pieces {
    /// `tokens` by id; `None` where no token has the id.
    pub(crate) fn new(tokens: impl IntoIterator<Item = Option<(Vec<u8>, Kind)>>, lead: usize) -> Pieces {
        let mut pieces = Pieces { starts: vec![0], lead, ..Pieces::default() };
        for token in tokens {
            let (bytes, kind) = token.unwrap_or_default();
            pieces.bytes.extend(bytes);
            pieces.starts.push(pieces.bytes.len());
            pieces.kinds.push(kind);
        }
        pieces
    }

    /// Number of ids, absent ones included.
    pub(crate) fn len(&self) -> usize {
        self.kinds.len()
    }

    pub(crate) fn kind(&self, id: u32) -> Kind {
        self.kinds.get(id as usize).copied().unwrap_or_default()
    }

    fn bytes(&self, id: u32) -> &[u8] {
        let i = id as usize;
        match (self.starts.get(i), self.starts.get(i + 1)) {
            (Some(&start), Some(&end)) => self.bytes.get(start..end).unwrap_or_default(),
            _ => &[],
        }
    }
}

/// Turns token ids into text while they come. A piece of text leaves as soon as its characters are complete; all pieces
/// together are the text that [`Tokenizer::decode`](super::Tokenizer::decode) gives for all ids. Bytes that are no UTF-8
/// become U+FFFD, and so does an id that is not in the vocabulary. Owns what it needs, and may move between threads.
#[derive(Clone, Debug)]
pub struct DecodeStream {
    pieces: Arc<Pieces>,
    skip_special: bool,
    /// The start of a character whose other bytes have not come: at most 3 bytes.
    pending: Vec<u8>,
    /// Spaces that may still be taken off the front.
    lead: usize,
}

impl DecodeStream {
    pub(crate) fn new(pieces: Arc<Pieces>, skip_special: bool) -> DecodeStream {
        let lead = pieces.lead;
        DecodeStream { pieces, skip_special, pending: Vec::new(), lead }
    }

    /// Takes the next id. Returns the text that is complete with it, `None` if there is none.
    pub fn push(&mut self, id: u32) -> Option<String> {
        let mut out = String::new();
        self.push_to(id, &mut out);
        (!out.is_empty()).then_some(out)
    }

    /// Ends the text: U+FFFD if it ends within a character, else nothing.
    pub fn finish(mut self) -> String {
        let mut out = String::new();
        self.finish_to(&mut out);
        out
    }

    pub(crate) fn push_to(&mut self, id: u32, out: &mut String) {
        match self.pieces.kind(id) {
            Kind::Special if self.skip_special => return,
            Kind::Absent => self.pending.extend("\u{FFFD}".bytes()),
            _ => {}
        }
        let start = out.len();
        let mut rest = Vec::new();
        let bytes = self.pieces.bytes(id);
        let mut left = if self.pending.is_empty() {
            bytes
        } else {
            rest.append(&mut self.pending);
            rest.extend(bytes);
            &rest
        };
        while let Err(e) = std::str::from_utf8(left) {
            let (valid, bad) = left.split_at(e.valid_up_to());
            out.push_str(&String::from_utf8_lossy(valid));
            match e.error_len() {
                Some(len) => {
                    out.push('\u{FFFD}');
                    left = &bad[len..];
                }
                None => {
                    self.pending = bad.to_vec();
                    left = &[];
                }
            }
        }
        out.push_str(&String::from_utf8_lossy(left));
        while self.lead > 0 && out.len() > start {
            if out[start..].starts_with(' ') {
                out.remove(start);
                self.lead -= 1;
            } else {
                self.lead = 0;
            }
        }
    }

    pub(crate) fn finish_to(&mut self, out: &mut String) {
        if !std::mem::take(&mut self.pending).is_empty() {
            out.push('\u{FFFD}');
        }
    }
}

/// The character that stands for a byte in byte-level BPE: printable Latin-1 stands for itself, the other 68 bytes are
/// numbered from U+0100 on.
pub(crate) fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(0x100 + rank).unwrap_or(char::REPLACEMENT_CHARACTER)
}

static CHAR_BYTE: LazyLock<HashMap<char, u8>> = LazyLock::new(|| (0..=255).map(|b| (byte_char(b), b)).collect());

/// The bytes that a token of byte-level BPE stands for. A token with a character that stands for no byte is its own
/// UTF-8.
pub(crate) fn byte_level_bytes(token: &str) -> Vec<u8> {
    token
        .chars()
        .map(|c| CHAR_BYTE.get(&c).copied())
        .collect::<Option<_>>()
        .unwrap_or_else(|| token.as_bytes().to_vec())
}

/// The byte that a token `<0xNN>` of a sentencepiece vocabulary stands for.
pub(crate) fn fallback_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_hexdigit())).then(|| u8::from_str_radix(hex, 16).ok()).flatten()
}

/// Sentencepiece's mark for a space, U+2581.
pub(crate) const SPACE_MARK: &str = "\u{2581}";

/// The bytes that a sentencepiece token stands for.
pub(crate) fn sentencepiece_bytes(token: &str) -> Vec<u8> {
    match fallback_byte(token) {
        Some(byte) => vec![byte],
        None => token.replace(SPACE_MARK, " ").into_bytes(),
    }
}
