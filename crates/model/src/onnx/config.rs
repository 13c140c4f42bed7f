//! `genai_config.json`, and whether a tokenizer puts the beginning-of-sequence token first.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::Origin;
use crate::error::Result;
use crate::file::read_small;

/// The largest `genai_config.json` that is read.
pub const MAX_CONFIG_BYTES: usize = 4 << 20;

/// What of `genai_config.json` concerns a decoder. Search defaults and session options are the caller's business.
#[derive(Clone, Debug, Deserialize)]
pub struct GenaiConfig {
    /// The `model` object.
    pub model: ModelSection,
}

/// `model`.
#[derive(Clone, Debug, Deserialize)]
pub struct ModelSection {
    /// Architecture: `llama`, `mistral`, `qwen2`, `qwen3`.
    #[serde(rename = "type")]
    pub arch: String,
    pub context_length: u64,
    pub vocab_size: u64,
    pub bos_token_id: Option<i64>,
    pub eos_token_id: Option<IntOrList>,
    pub pad_token_id: Option<i64>,
    pub decoder: DecoderSection,
    pub vision: Option<Value>,
    pub speech: Option<Value>,
    pub embedding: Option<Value>,
    pub encoder: Option<Value>,
}

/// `model.decoder`.
#[derive(Clone, Debug, Deserialize)]
pub struct DecoderSection {
    pub filename: Option<String>,
    pub head_size: u64,
    pub hidden_size: u64,
    pub num_attention_heads: u64,
    pub num_hidden_layers: u64,
    pub num_key_value_heads: u64,
    #[serde(default)]
    pub inputs: BTreeMap<String, Value>,
    #[serde(default)]
    pub outputs: BTreeMap<String, Value>,
    pub pipeline: Option<Value>,
}

/// A token id, or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum IntOrList {
    /// One.
    One(i64),
    /// Several, some of which may be null.
    Many(Vec<Option<i64>>),
}

impl IntOrList {
    /// The ids in the file's order.
    pub fn to_vec(&self) -> Vec<i64> {
        match self {
            IntOrList::One(i) => vec![*i],
            IntOrList::Many(l) => l.iter().copied().flatten().collect(),
        }
    }
}

impl DecoderSection {
    /// The name of a graph input or output: the file's own, or the builder's usual one.
    pub fn name<'a>(&'a self, outputs: bool, key: &str, usual: &'a str) -> &'a str {
        let map = if outputs { &self.outputs } else { &self.inputs };
        map.get(key).and_then(Value::as_str).unwrap_or(usual)
    }
}

/// Parses the bytes of a `genai_config.json`.
///
/// # Errors
/// `Format` for bytes that are no JSON or lack a field, with line and column; `Unsupported` for models of several
/// parts.
pub fn parse(bytes: &[u8], origin: &Origin<'_>) -> Result<GenaiConfig> {
    if bytes.len() > MAX_CONFIG_BYTES {
        return Err(origin.format(None, format!("{} bytes is no genai_config.json", bytes.len())));
    }
    let config: GenaiConfig = serde_json::from_slice(bytes)
        .map_err(|e| origin.format(None, format!("not a valid genai_config.json: {e}")))?;
    let m = &config.model;
    for (key, part) in [
        ("vision", &m.vision),
        ("speech", &m.speech),
        ("embedding", &m.embedding),
        ("encoder", &m.encoder),
        ("decoder.pipeline", &m.decoder.pipeline),
    ] {
        if part.as_ref().is_some_and(|v| !v.is_null()) {
            return Err(origin.unsupported(
                Some(format!("model.{key}")),
                "models of several parts are not supported, only one decoder graph",
            ));
        }
    }
    Ok(config)
}

/// Reads the file beside the model.
pub fn read(path: &Path) -> Result<GenaiConfig> {
    let origin = Origin { path };
    let bytes = match std::fs::metadata(path) {
        Ok(m) if m.is_file() && m.len() > MAX_CONFIG_BYTES as u64 => {
            return Err(origin.format(None, format!("{} bytes is no genai_config.json", m.len())));
        }
        Ok(m) if m.is_file() => read_small(path, MAX_CONFIG_BYTES as u64)?,
        Ok(_) => return Err(origin.format(None, "not a regular file")),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(origin.format(
                None,
                "missing: an ONNX model directory has a genai_config.json beside the graph; \
                 export with onnxruntime_genai.models.builder, or load the directory that has it",
            ));
        }
        Err(e) => return Err(origin.io(e)),
    };
    parse(&bytes, &origin)
}

#[derive(Deserialize)]
struct TokenizerFile {
    post_processor: Option<Value>,
}

#[derive(Deserialize)]
struct TokenizerConfig {
    add_bos_token: Option<bool>,
}

/// True if the tokenizer in `dir` puts token `bos` in front of a text: `add_bos_token` of `tokenizer_config.json`, else
/// the template of `tokenizer.json`. False where neither file says so; files that don't parse are the tokenizer's to
/// report.
pub fn adds_bos(dir: &Path, bos: Option<u32>) -> bool {
    let Some(bos) = bos else { return false };
    let read = |name: &str| std::fs::read(dir.join(name)).ok();
    let said = read("tokenizer_config.json")
        .and_then(|b| serde_json::from_slice::<TokenizerConfig>(&b).ok())
        .and_then(|c| c.add_bos_token);
    if let Some(said) = said {
        return said;
    }
    read("tokenizer.json")
        .and_then(|b| serde_json::from_slice::<TokenizerFile>(&b).ok())
        .and_then(|t| t.post_processor)
        .is_some_and(|p| template_starts_with(&p, bos))
}

/// Looks into `TemplateProcessing`, alone or inside a `Sequence`.
fn template_starts_with(processor: &Value, bos: u32) -> bool {
    let nested = processor.get("processors").and_then(Value::as_array);
    if let Some(list) = nested {
        return list.iter().any(|p| p.get("processors").is_none() && template_starts_with(p, bos));
    }
    let Some(name) = processor.pointer("/single/0/SpecialToken/id").and_then(Value::as_str) else { return false };
    processor
        .get("special_tokens")
        .and_then(|t| t.get(name))
        .and_then(|t| t.get("ids"))
        .and_then(Value::as_array)
        .is_some_and(|ids| ids.first().and_then(Value::as_u64) == Some(u64::from(bos)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_of_a_sequence_is_found() {
        let p: Value = serde_json::from_str(
            r#"{"type":"Sequence","processors":[{"type":"ByteLevel"},{"type":"TemplateProcessing",
            "single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],
            "special_tokens":{"<s>":{"id":"<s>","ids":[7],"tokens":["<s>"]}}}]}"#,
        )
        .unwrap();
        assert!(template_starts_with(&p, 7));
        assert!(!template_starts_with(&p, 8));
    }
}
