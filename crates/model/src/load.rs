//! One door for every container: a path to a model's spec and tokenizer.

use std::path::{Path, PathBuf};

use crate::error::{ModelError, Result};
use crate::spec::ModelSpec;
use crate::tokenizer::Tokenizer;
use crate::{gguf, onnx, stop};

/// A model's files, read.
#[derive(Debug)]
pub struct Model {
    /// What is to be computed.
    pub spec: ModelSpec,
    /// Text to tokens and back; `None` if the files have no tokenizer: such a model takes and gives token ids only.
    pub tokenizer: Option<Tokenizer>,
}

/// Reads the model at `path`: a GGUF file (any file of a split one), a directory of the ONNX Runtime GenAI builder or the
/// `.onnx` file in it, or a directory that holds GGUF files of one model and nothing of the others.
///
/// # Errors
/// [`ModelError`], in every variant.
pub fn load(path: &Path) -> Result<Model> {
    match container(path)? {
        Container::Gguf(file) => {
            let gguf::LoadedGguf { mut spec, vocab } = gguf::load(&file)?;
            let mut tokenizer = match vocab.is_absent() {
                true => None,
                false => Some(Tokenizer::from_gguf(&file, &vocab)?),
            };
            // Beside a file that was named there may lie files of other models; a directory is one model's.
            let dir = path.is_dir().then_some(path);
            stop::gather(&file, dir, &mut spec, tokenizer.as_mut())?;
            Ok(Model { spec, tokenizer })
        }
        Container::Onnx(target, dir) => {
            let mut spec = onnx::load(&target)?;
            let mut tokenizer = match dir.join("tokenizer.json").is_file() {
                true => {
                    let special = &spec.special;
                    Some(Tokenizer::from_dir(&dir)?.with_special_ids(special.bos, &special.eos, special.pad)?)
                }
                false => None,
            };
            stop::gather(&target, Some(&dir), &mut spec, tokenizer.as_mut())?;
            Ok(Model { spec, tokenizer })
        }
    }
}

enum Container {
    Gguf(PathBuf),
    /// What the ONNX loader takes, and the directory that it lies in.
    Onnx(PathBuf, PathBuf),
}

fn container(path: &Path) -> Result<Container> {
    let io = |source| ModelError::Io { path: path.to_path_buf(), source };
    let meta = std::fs::metadata(path).map_err(io)?;
    if meta.is_file() {
        let onnx = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("onnx"));
        let dir = path.parent().unwrap_or(Path::new(".")).to_path_buf();
        // Anything else is taken for GGUF: its magic decides, and the error says what a file should have begun with.
        return Ok(if onnx { Container::Onnx(path.to_path_buf(), dir) } else { Container::Gguf(path.to_path_buf()) });
    }
    if path.join("genai_config.json").is_file() || path.join("model.onnx").is_file() {
        return Ok(Container::Onnx(path.to_path_buf(), path.to_path_buf()));
    }
    let mut found: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(path).map_err(io)? {
        let file = entry.map_err(io)?.path();
        if file.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) {
            found.push(file);
        }
    }
    found.sort();
    let name = |p: &PathBuf| p.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let split = found.first().is_some_and(|f| name(f).contains("-00001-of-"));
    match found.as_slice() {
        [one] => Ok(Container::Gguf(one.clone())),
        [first, ..] if split => Ok(Container::Gguf(first.clone())),
        [] => Err(ModelError::Format {
            path: path.to_path_buf(),
            tensor: None,
            offset: None,
            what: "this directory holds neither genai_config.json (ONNX Runtime GenAI) nor a .gguf file".to_string(),
        }),
        [first, ..] => Err(ModelError::Format {
            path: path.to_path_buf(),
            tensor: None,
            offset: None,
            what: format!("this directory holds {} GGUF files; name one, such as {}", found.len(), name(first)),
        }),
    }
}
