//! A tokenizer from the files of a model directory, as Hugging Face's libraries write them.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde::Deserialize;
use serde_json::Value;

use super::pieces::{Kind, Pieces, SPACE_MARK, byte_char, byte_level_bytes, sentencepiece_bytes};
use super::{Tokenizer, guarded};
use crate::chat::{ChatTemplate, MAX_TEMPLATE};
use crate::error::{ModelError, Result};
use crate::file::read_small;
use crate::spec::SpecialTokens;

/// Largest `tokenizer.json`, bytes.
const MAX_TOKENIZER: u64 = 256 << 20;
/// Largest other JSON file, bytes.
const MAX_CONFIG: u64 = 16 << 20;

/// How a token's text becomes bytes of the decoded text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextRule {
    /// One character a byte.
    ByteLevel,
    /// U+2581 is a space, `<0xNN>` a byte; `lead` spaces come off the front of the whole.
    Sentencepiece { lead: usize },
}

/// What has to be known of `tokenizer.json` besides what the tokenizer library reads.
#[derive(Deserialize)]
struct Head {
    model: ModelHead,
    decoder: Option<Value>,
    #[serde(default)]
    added_tokens: Vec<AddedHead>,
}

#[derive(Deserialize)]
struct ModelHead {
    #[serde(rename = "type")]
    kind: Option<String>,
    dropout: Option<f32>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
}

#[derive(Deserialize)]
struct AddedHead {
    id: u32,
    content: String,
}

pub(super) fn load(dir: &Path) -> Result<Tokenizer> {
    let path = dir.join("tokenizer.json");
    let text = read_text(&path, MAX_TOKENIZER)?;
    let head: Head = serde_json::from_str(&text).map_err(|e| fault(&path, None, e.to_string()))?;
    check_model(&path, &head.model)?;
    let rule = text_rule(&path, head.decoder.as_ref())?;
    let mut inner = guarded(&path, "not a tokenizer", || text.parse::<tokenizers::Tokenizer>())?;
    guarded(&path, "truncation", || inner.with_truncation(None).map(|_| ()))?;
    inner.with_padding(None);
    for token in &head.added_tokens {
        if inner.token_to_id(&token.content) != Some(token.id) {
            let what = format!("{:?} can't have the id {}", token.content, token.id);
            return Err(fault(&path, Some("added_tokens"), what));
        }
    }
    let pieces = pieces(&path, &inner, rule)?;
    let (mut prefix, suffix) = affixes(&path, &inner)?;

    let config_path = dir.join("tokenizer_config.json");
    let config = Config { value: read_json(&config_path)?, path: config_path };
    let map_path = dir.join("special_tokens_map.json");
    let map = Config { value: read_json(&map_path)?, path: map_path };
    let id = |key: &str| -> Result<Option<u32>> {
        for file in [&config, &map] {
            if let Some(token) = file.token(key)? {
                let id = inner.token_to_id(&token);
                let what = || format!("{token:?} is not in the vocabulary");
                return id.map(Some).ok_or_else(|| fault(&file.path, Some(key), what()));
            }
        }
        Ok(None)
    };
    let bos = id("bos_token")?;
    let mut add_bos = bos.is_some() && prefix.first().copied() == bos;
    if add_bos {
        prefix.remove(0);
    }
    if let Some(asked) = config.flag("add_bos_token")? {
        if asked && bos.is_none() {
            return Err(fault(&config.path, Some("add_bos_token"), "is true, but no file names a `bos_token`".into()));
        }
        add_bos = asked;
    }
    let special = SpecialTokens { bos, eos: id("eos_token")?.into_iter().collect(), pad: id("pad_token")?, add_bos };
    let unk = id("unk_token")?;
    let template = template(dir, &config)?;
    let literal = OnceLock::new();
    Ok(Tokenizer { path, inner, literal, pieces: pieces.into(), special, unk, prefix, suffix, template })
}

fn fault(path: &Path, key: Option<&str>, what: String) -> ModelError {
    ModelError::Format { path: path.to_path_buf(), tensor: key.map(Into::into), offset: None, what }
}

fn unsupported(path: &Path, item: &str, what: String) -> ModelError {
    ModelError::Unsupported { path: path.to_path_buf(), item: Some(item.into()), what }
}

fn check_model(path: &Path, model: &ModelHead) -> Result<()> {
    let given = |text: &Option<String>| text.as_ref().is_some_and(|t| !t.is_empty());
    match &model.kind {
        Some(kind) if kind == "BPE" => {}
        kind => {
            let kind = kind.as_deref().unwrap_or("none");
            return Err(unsupported(path, "model.type", format!("`{kind}`; only BPE is supported")));
        }
    }
    if model.dropout.is_some_and(|p| p != 0.0) {
        return Err(unsupported(path, "model.dropout", "tokens that depend on chance; set it to null".into()));
    }
    if given(&model.continuing_subword_prefix) || given(&model.end_of_word_suffix) {
        return Err(unsupported(path, "model", "marks on parts of words are not supported".into()));
    }
    Ok(())
}

/// Reads the decoder: byte-level, or the steps that sentencepiece vocabularies are written with.
fn text_rule(path: &Path, decoder: Option<&Value>) -> Result<TextRule> {
    let steps = match decoder {
        Some(Value::Object(o)) if o.get("type").and_then(Value::as_str) == Some("Sequence") => {
            o.get("decoders").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
        }
        Some(decoder) => std::slice::from_ref(decoder),
        None => &[],
    };
    let (mut byte_level, mut marks, mut bytes, mut lead) = (false, false, false, 0);
    for step in steps {
        let text = |key: &str| step.get(key).and_then(Value::as_str);
        let number = |key: &str| step.get(key).and_then(Value::as_u64);
        match text("type") {
            Some("ByteLevel") => byte_level = true,
            Some("Fuse") => {}
            Some("ByteFallback") => bytes = true,
            Some("Replace")
                if step.pointer("/pattern/String").and_then(Value::as_str) == Some(SPACE_MARK)
                    && text("content") == Some(" ") =>
            {
                marks = true;
            }
            Some("Strip") if text("content") == Some(" ") && number("stop") == Some(0) => {
                lead = number("start").unwrap_or(0).min(64) as usize;
            }
            _ => return Err(unsupported(path, "decoder", format!("the step {step}"))),
        }
    }
    match (byte_level, marks && bytes) {
        (true, false) if lead == 0 && !marks && !bytes => Ok(TextRule::ByteLevel),
        (false, true) => Ok(TextRule::Sentencepiece { lead }),
        _ => Err(unsupported(path, "decoder", "neither a byte-level decoder nor a sentencepiece one".into())),
    }
}

/// The bytes of every token. The ids must be distinct, and not much further apart than there are tokens.
pub(super) fn pieces(path: &Path, inner: &tokenizers::Tokenizer, rule: TextRule) -> Result<Pieces> {
    let vocab = inner.get_vocab(true);
    let added = inner.get_added_tokens_decoder();
    let limit = 4 * vocab.len() + 65_536;
    let mut tokens: Vec<Option<(Vec<u8>, Kind)>> = Vec::new();
    for (text, id) in vocab {
        let i = id as usize;
        if i >= limit {
            return Err(fault(path, None, format!("the id {id} of {text:?} is far beyond the number of tokens")));
        }
        if i >= tokens.len() {
            tokens.resize(i + 1, None);
        }
        let token = match (added.get(&id), rule) {
            (Some(token), _) if token.special => (text.into_bytes(), Kind::Special),
            (Some(_), TextRule::ByteLevel) => (text.into_bytes(), Kind::Text),
            (None, TextRule::ByteLevel) => (byte_level_bytes(&text), Kind::Text),
            (_, TextRule::Sentencepiece { .. }) => (sentencepiece_bytes(&text), Kind::Text),
        };
        if tokens[i].replace(token).is_some() {
            return Err(fault(path, None, format!("two tokens have the id {id}")));
        }
    }
    if rule == TextRule::ByteLevel {
        let lost = |b: &u8| inner.token_to_id(byte_char(*b).encode_utf8(&mut [0; 4])).is_none();
        let lost: Vec<u8> = (0..=0xF4).filter(|b| !matches!(b, 0xC0 | 0xC1)).filter(lost).collect();
        if !lost.is_empty() {
            // Nothing to be warned of at each load: these are bytes that hardly any text has.
            log::info!("{}: no tokens for the bytes {lost:02X?}; they are dropped from text", path.display());
        }
    }
    let lead = if let TextRule::Sentencepiece { lead } = rule { lead } else { 0 };
    Ok(Pieces::new(tokens, lead))
}

/// What the file's post-processor puts before and after a text.
fn affixes(path: &Path, inner: &tokenizers::Tokenizer) -> Result<(Vec<u32>, Vec<u32>)> {
    let ids = |add| guarded(path, "encoding failed", || Ok(inner.encode_fast("a", add)?.get_ids().to_vec()));
    let (plain, whole) = (ids(false)?, ids(true)?);
    let at = (0..=whole.len()).find(|&at| whole.get(at..).is_some_and(|rest| rest.starts_with(&plain)));
    let at = at.ok_or_else(|| unsupported(path, "post_processor", "it changes the text's own tokens".into()))?;
    Ok((whole[..at].to_vec(), whole[at + plain.len()..].to_vec()))
}

fn template(dir: &Path, config: &Config) -> Result<Option<ChatTemplate>> {
    let path = dir.join("chat_template.jinja");
    if path.exists() {
        return Ok(Some(ChatTemplate::new(&path, "default", &read_text(&path, MAX_TEMPLATE as u64)?)));
    }
    let wrong = || fault(&config.path, Some("chat_template"), "must be a text, or a list of names and texts".into());
    let named = match config.value.get("chat_template") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(source)) => return Ok(Some(ChatTemplate::new(&config.path, "default", source))),
        Some(Value::Array(named)) => named,
        Some(_) => return Err(wrong()),
    };
    let mut names = Vec::new();
    for entry in named {
        let text = |key: &str| entry.get(key).and_then(Value::as_str);
        let (name, source) = text("name").zip(text("template")).ok_or_else(wrong)?;
        if name == "default" {
            return Ok(Some(ChatTemplate::new(&config.path, name, source)));
        }
        names.push(name);
    }
    if !names.is_empty() {
        log::warn!("{}: no chat template called `default`, only {names:?}; none is used", config.path.display());
    }
    Ok(None)
}

/// One of the small JSON files; null if it is absent.
struct Config {
    path: PathBuf,
    value: Value,
}

impl Config {
    /// A token's text, given as such or as an object with its `content`.
    fn token(&self, key: &str) -> Result<Option<String>> {
        match self.value.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(value) => match value.get("content").and_then(Value::as_str) {
                Some(text) => Ok(Some(text.into())),
                None => Err(fault(&self.path, Some(key), "must be a text, or an object with a text `content`".into())),
            },
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.value.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(fault(&self.path, Some(key), "must be true or false".into())),
        }
    }
}

fn read_json(path: &Path) -> Result<Value> {
    if !path.exists() {
        return Ok(Value::Null);
    }
    let value: Value =
        serde_json::from_str(&read_text(path, MAX_CONFIG)?).map_err(|e| fault(path, None, e.to_string()))?;
    if !value.is_object() {
        return Err(fault(path, None, "must be a JSON object".into()));
    }
    Ok(value)
}

fn read_text(path: &Path, limit: u64) -> Result<String> {
    String::from_utf8(read_small(path, limit)?).map_err(|e| {
        let offset = Some(e.utf8_error().valid_up_to() as u64);
        ModelError::Format { path: path.to_path_buf(), tensor: None, offset, what: "not UTF-8".into() }
    })
}
