//! The vocabulary and special tokens of a GGUF file, from `tokenizer.*` metadata.

use crate::error::Result;
use crate::gguf::header::GgufFile;
use crate::gguf::value::{Value, ValueType};
use crate::tokenizer::GgufVocab;

const MODEL: &str = "tokenizer.ggml.model";
const TOKENS: &str = "tokenizer.ggml.tokens";

/// Reads the vocabulary. A file without one gives an empty one, with the model name `none`.
pub(super) fn read(file: &GgufFile) -> Result<GgufVocab> {
    let id = |suffix: &str| token_id(file, &format!("tokenizer.ggml.{suffix}"));
    let tokens = strings(file, TOKENS)?;
    let range = tokens.len();
    let mut vocab = GgufVocab {
        model: file.string(MODEL)?.unwrap_or("none").to_owned(),
        pre: file.string("tokenizer.ggml.pre")?.map(str::to_owned),
        tokens,
        token_types: token_types(file)?,
        scores: scores(file)?,
        merges: strings(file, "tokenizer.ggml.merges")?,
        bos: id("bos_token_id")?,
        eos: id("eos_token_id")?,
        unk: id("unknown_token_id")?,
        pad: id("padding_token_id")?,
        extra_eos: Vec::new(),
        add_bos: file.boolean("tokenizer.ggml.add_bos_token")?,
        add_eos: file.boolean("tokenizer.ggml.add_eos_token")?,
        add_space_prefix: file.boolean("tokenizer.ggml.add_space_prefix")?,
        chat_template: file.string("tokenizer.chat_template")?.map(str::to_owned),
    };
    for suffix in ["eot_token_id", "eom_token_id"] {
        vocab.extra_eos.extend(id(suffix)?);
    }
    for suffix in ["bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id"] {
        check_range(file, suffix, id(suffix)?, range)?;
    }
    for (suffix, id) in [("unknown_token_id", &mut vocab.unk), ("padding_token_id", &mut vocab.pad)] {
        // Generation has no use for these, and files with wrong ones exist.
        if let Err(error) = check_range(file, suffix, *id, range) {
            log::warn!("{error}; left out");
            *id = None;
        }
    }
    Ok(vocab)
}

/// A token id; -1, however wide, stands for "none".
fn token_id(file: &GgufFile, key: &str) -> Result<Option<u32>> {
    if matches!(file.value(key), Some(Value::Int(-1))) {
        return Ok(None);
    }
    match file.uint(key)?.map(u32::try_from) {
        None | Some(Ok(u32::MAX)) => Ok(None),
        Some(Ok(id)) => Ok(Some(id)),
        Some(Err(_)) => Err(file.key_error(key, "is no token id: it needs more than 32 bits")),
    }
}

fn check_range(file: &GgufFile, suffix: &str, id: Option<u32>, tokens: usize) -> Result<()> {
    match id {
        Some(id) if tokens != 0 && id as usize >= tokens => {
            let key = format!("tokenizer.ggml.{suffix}");
            Err(file.key_error(&key, format!("token id {id}, but there are {tokens} tokens")))
        }
        _ => Ok(()),
    }
}

fn strings(file: &GgufFile, key: &str) -> Result<Vec<String>> {
    let Some(view) = file.array(key)? else { return Ok(Vec::new()) };
    if view.elem() != ValueType::Str && !view.is_empty() {
        return Err(file.key_error(key, format!("elements should be strings, but each is {}", view.elem().name())));
    }
    Ok(view.strings().map(str::to_owned).collect())
}

fn token_types(file: &GgufFile) -> Result<Vec<i32>> {
    const KEY: &str = "tokenizer.ggml.token_type";
    let Some(view) = file.array(KEY)? else { return Ok(Vec::new()) };
    let number = |v: Value| match v {
        Value::Int(n) => i32::try_from(n).ok(),
        Value::Uint(n) => i32::try_from(n).ok(),
        _ => None,
    };
    let types: Option<Vec<i32>> = view.scalars().map(number).collect();
    types.filter(|t| t.len() == view.len()).ok_or_else(|| file.key_error(KEY, "elements should be 32-bit integers"))
}

fn scores(file: &GgufFile) -> Result<Vec<f32>> {
    const KEY: &str = "tokenizer.ggml.scores";
    let Some(view) = file.array(KEY)? else { return Ok(Vec::new()) };
    if view.elem() != ValueType::F32 {
        return Err(file.key_error(KEY, format!("elements should be f32, but each is {}", view.elem().name())));
    }
    Ok(view.scalars().filter_map(|v| v.number()).map(|x| x as f32).collect())
}
