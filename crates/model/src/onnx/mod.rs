//! ONNX model directories, as ONNX Runtime GenAI's builder exports them, to a [`ModelSpec`].
//!
//! The graph is not executed: the decoder in it is recognised, and whatever is not understood is refused by name.
//! [`load`] reads a directory, [`parse_bytes`] the same from memory.

mod attention;
mod config;
mod decoder;
mod external;
mod graph;
mod initializers;
mod mask;
#[allow(missing_docs)]
mod proto;
mod repack;
mod rope_fit;
mod weights;
mod wire;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use prost::Message;

use self::config::GenaiConfig;
use self::decoder::{Decoder, FoundDecoder};
use self::external::{DataSource, Directory};
use self::graph::Graph;
use self::initializers::Initializers;
use self::proto::{GraphProto, Model, ValueInfo};
pub use self::rope_fit::{RopeFit, rope_fit};
use self::weights::Weights;
use crate::error::{ModelError, Result};
use crate::families::{self, FAMILIES};
use crate::file::{ModelFile, refuse_lfs_pointer};
use crate::spec::{DecoderConfig, ModelSpec, RopeTables, SpecialTokens};

/// Versions of ONNX's own operators that mean what this loader takes them to mean.
const OPSETS: std::ops::RangeInclusive<i64> = 13..=24;

/// Which file an error is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin<'p> {
    path: &'p Path,
}

/// Names and texts of a file as messages show them: at most 400 characters.
fn clip(text: impl Into<String>) -> String {
    const MOST: usize = 400;
    let text = text.into();
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

impl Origin<'_> {
    fn io(&self, source: std::io::Error) -> ModelError {
        ModelError::Io { path: self.path.to_path_buf(), source }
    }

    fn format(&self, tensor: Option<&str>, what: impl Into<String>) -> ModelError {
        let tensor = tensor.map(clip);
        ModelError::Format { path: self.path.to_path_buf(), tensor, offset: None, what: clip(what) }
    }

    fn format_at(&self, offset: usize, what: impl Into<String>) -> ModelError {
        let offset = Some(offset as u64);
        ModelError::Format { path: self.path.to_path_buf(), tensor: None, offset, what: clip(what) }
    }

    fn format_in(&self, tensor: &str, offset: u64, what: impl Into<String>) -> ModelError {
        let (tensor, offset) = (Some(clip(tensor)), Some(offset));
        ModelError::Format { path: self.path.to_path_buf(), tensor, offset, what: clip(what) }
    }

    fn unsupported(&self, item: Option<String>, what: impl Into<String>) -> ModelError {
        ModelError::Unsupported { path: self.path.to_path_buf(), item: item.map(clip), what: clip(what) }
    }
}

/// Loads an ONNX model: a directory with a `genai_config.json`, or a `.onnx` file in such a directory (for exports
/// with several graphs). Weights stay in the mapped files; only weights of `DequantizeLinear` whose layout is not
/// Headrace's are rearranged in memory.
///
/// # Errors
/// See [`ModelError`]. Whatever the file asks for that is not understood is an error naming it.
pub fn load(path: &Path) -> Result<ModelSpec> {
    let is_dir = std::fs::metadata(path).map_err(|e| Origin { path }.io(e))?.is_dir();
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let dir = if is_dir { path } else { parent };
    let config_path = dir.join("genai_config.json");
    let config = config::read(&config_path)?;
    let file_path = if is_dir { graph_path(dir, &config, &config_path)? } else { path.to_path_buf() };
    let file = match ModelFile::open(&file_path) {
        Err(ModelError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Err(Origin { path: &config_path }
                .format(Some("model.decoder.filename"), format!("names {}, which is missing", file_path.display())));
        }
        other => other?,
    };
    let mut source = Directory::new(&file_path, dir);
    let name = dir.canonicalize().ok().and_then(|d| Some(d.file_name()?.to_string_lossy().into_owned()));
    let mut spec = read(&file, &config, &config_path, &mut source)?;
    spec.name = name.unwrap_or_else(|| file_path.display().to_string());
    spec.special.add_bos = config::adds_bos(dir, spec.special.bos);
    Ok(spec)
}

fn graph_path(dir: &Path, config: &GenaiConfig, config_path: &Path) -> Result<PathBuf> {
    let name = config.model.decoder.filename.as_deref().unwrap_or("model.onnx");
    external::check_location(name, "model.decoder.filename", &Origin { path: config_path })?;
    Ok(dir.join(name))
}

/// The same from bytes in memory: the graph, its `genai_config.json`, and one file of external data that answers to
/// every name. Symbolic links and missing files aside, it refuses what [`load`] refuses.
pub fn parse_bytes(graph: Bytes, genai_config: &[u8], data: Bytes) -> Result<ModelSpec> {
    struct Same(Bytes);
    impl DataSource for Same {
        fn open(&mut self, location: &str, _tensor: &str) -> Result<ModelFile> {
            Ok(ModelFile::owned(location, self.0.clone()))
        }
    }
    let config_path = Path::new("genai_config.json");
    let config = config::parse(genai_config, &Origin { path: config_path })?;
    read(&ModelFile::owned("model.onnx", graph), &config, config_path, &mut Same(data))
}

fn decode(file: &ModelFile, origin: &Origin<'_>) -> Result<Model> {
    if file.bytes.is_empty() {
        return Err(origin.format(None, "the file is empty"));
    }
    refuse_lfs_pointer(&file.path, &file.bytes)?;
    wire::check(&file.bytes, origin)?;
    // Decoding from `Bytes` leaves `raw_data` where it is: in the mapping.
    Model::decode(file.bytes.clone()).map_err(|e| origin.format(None, format!("not a valid ONNX model: {e}")))
}

/// Refuses everything at the level of the model that is not understood.
fn check_model(model: &Model, origin: &Origin<'_>) -> Result<()> {
    if !(3..=13).contains(&model.ir_version) {
        return Err(
            origin.unsupported(Some("ir_version".into()), format!("{}; 3 to 13 are supported", model.ir_version))
        );
    }
    if !model.functions.is_empty() {
        return Err(origin.unsupported(Some("functions".into()), "models with functions of their own"));
    }
    if !model.training_info.is_empty() {
        return Err(origin.unsupported(Some("training_info".into()), "models with training graphs"));
    }
    let used: HashSet<&str> = model.graph.iter().flat_map(|g| &g.node).map(|n| n.domain.as_str()).collect();
    let mut seen = HashSet::new();
    for o in &model.opset_import {
        let domain = if o.domain == "ai.onnx" { "" } else { o.domain.as_str() };
        if !seen.insert(domain) {
            return Err(origin.format(Some("opset_import"), format!("domain {domain:?} twice")));
        }
        let known = match domain {
            "" => OPSETS.contains(&o.version),
            graph::MICROSOFT => o.version == 1,
            other => !used.contains(other),
        };
        if !known {
            return Err(origin.unsupported(
                Some("opset_import".into()),
                format!(
                    "domain {domain:?} version {}; ai.onnx {OPSETS:?} and com.microsoft 1 are supported",
                    o.version
                ),
            ));
        }
    }
    match used.iter().map(|d| if *d == "ai.onnx" { "" } else { *d }).find(|d| !seen.contains(d)) {
        Some(d) => Err(origin.format(Some("opset_import"), format!("nodes use domain {d:?}, which is not imported"))),
        None => Ok(()),
    }
}

/// Refuses parts of a graph that are not understood, and says so early where the whole model is out of reach.
fn check_graph(graph: &GraphProto, config: &GenaiConfig, config_path: &Path, origin: &Origin<'_>) -> Result<()> {
    if let Some(n) = graph.node.iter().find(|n| matches!(n.op_type.as_str(), "QMoE" | "MoE")) {
        return Err(origin.unsupported(
            Some(format!("{} ({})", n.name, n.op_type)),
            "GPT-OSS mixture-of-experts models are not supported yet",
        ));
    }
    let known = FAMILIES.map(|family| family.arch);
    if !known.contains(&config.model.arch.as_str()) {
        return Err(Origin { path: config_path }.unsupported(
            Some("model.type".into()),
            format!("architecture {:?}; {} are supported", config.model.arch, known.join(", ")),
        ));
    }
    if !graph.sparse_initializer.is_empty() {
        return Err(origin.unsupported(Some("sparse_initializer".into()), "sparse weights"));
    }
    if !graph.quantization_annotation.is_empty() {
        return Err(origin.unsupported(Some("quantization_annotation".into()), "quantisation annotations"));
    }
    for n in &graph.node {
        if let Some(a) = n.attribute.iter().find(|a| a.g.is_some()) {
            return Err(origin.unsupported(
                Some(format!("{} ({})", n.name, n.op_type)),
                format!("attribute {} holds a graph: control flow is not supported", a.name),
            ));
        }
    }
    Ok(())
}

fn read(file: &ModelFile, config: &GenaiConfig, config_path: &Path, source: &mut dyn DataSource) -> Result<ModelSpec> {
    let origin = Origin { path: &file.path };
    let model = decode(file, &origin)?;
    let Some(proto) = &model.graph else {
        return Err(origin.format(None, "no graph: is this an ONNX file?"));
    };
    check_graph(proto, config, config_path, &origin)?;
    check_model(&model, &origin)?;
    let init = Initializers::read(&proto.initializer, file, source, &origin)?;
    let graph = Graph::new(proto, &init, &origin)?;
    let section = &config.model.decoder;
    let ids = section.name(false, "input_ids", "input_ids");
    let mask = section.name(false, "attention_mask", "attention_mask");
    let positions = section.name(false, "position_ids", "position_ids");
    let logits = section.name(true, "logits", "logits");
    let Some(logits) = proto.output.iter().map(|o| o.name.as_str()).find(|o| *o == logits) else {
        return Err(origin.format(Some(logits), "the graph has no such output"));
    };
    let mut weights = Weights::new(init);
    let found = Decoder::new(&graph, &mut weights, mask, positions).walk(logits, ids)?;
    refuse_leftovers(&graph, &weights)?;
    check_inputs_and_outputs(proto, config, &found, &origin)?;
    agree(config, config_path, &found, &weights, &origin)?;
    let special = special_tokens(config, config_path, found.vocab)?;
    let (tensors, files) = weights.finish();
    let spec = ModelSpec {
        container: "onnx",
        name: file.path.display().to_string(),
        config: DecoderConfig {
            arch: config.model.arch.clone(),
            vocab: found.vocab,
            hidden: found.hidden,
            heads: found.heads,
            kv_heads: found.kv_heads,
            head_dim: found.head_dim,
            ffn: found.ffn,
            norm_eps: found.norm_eps,
            max_context: config.model.context_length as usize,
            rope: found.rope,
        },
        embedding: found.embedding,
        layers: found.layers,
        final_norm: found.final_norm,
        lm_head: found.lm_head,
        tensors,
        files,
        special,
    };
    families::check(&file.path, &spec)?;
    Ok(spec)
}

/// Every node and initializer must have a part in the decoder.
fn refuse_leftovers(graph: &Graph<'_>, weights: &Weights<'_>) -> Result<()> {
    if let Some(n) = graph.unclaimed() {
        return Err(graph.unsupported(n, "has no part in the decoder that the rest of the graph is"));
    }
    match weights.init.iter().find(|i| !i.used.get()) {
        Some(i) => {
            Err(graph.origin.unsupported(Some(i.name.to_string()), "an initializer that nothing in the decoder uses"))
        }
        None => Ok(()),
    }
}

fn fixed_dim(v: &ValueInfo, i: usize) -> Option<i64> {
    v.r#type.as_ref()?.tensor_type.as_ref()?.shape.as_ref()?.dim.get(i)?.dim_value
}

/// Inputs and outputs by name: tokens, mask, positions, logits, and each layer's cache in its place.
fn check_inputs_and_outputs(
    proto: &GraphProto,
    config: &GenaiConfig,
    found: &FoundDecoder<'_>,
    origin: &Origin<'_>,
) -> Result<()> {
    let d = &config.model.decoder;
    let patterns = [
        d.name(false, "past_key_names", "past_key_values.%d.key"),
        d.name(false, "past_value_names", "past_key_values.%d.value"),
        d.name(true, "present_key_names", "present.%d.key"),
        d.name(true, "present_value_names", "present.%d.value"),
    ];
    let mut inputs: HashSet<String> =
        [("input_ids", "input_ids"), ("attention_mask", "attention_mask"), ("position_ids", "position_ids")]
            .into_iter()
            .map(|(key, usual)| d.name(false, key, usual).to_string())
            .collect();
    let mut outputs: HashSet<String> = HashSet::from([d.name(true, "logits", "logits").to_string()]);
    let mut caches = HashSet::new();
    for (layer, names) in found.caches.iter().enumerate() {
        for (i, (have, pattern)) in names.iter().zip(patterns).enumerate() {
            let want = pattern.replacen("%d", &layer.to_string(), 1);
            if *have != want {
                return Err(origin.format(
                    Some(have),
                    format!("layer {layer} keeps its cache here, but genai_config.json says in {want:?}"),
                ));
            }
            if i < 2 {
                caches.insert(*have);
                inputs.insert(want);
            } else {
                outputs.insert(want);
            }
        }
    }
    for v in &proto.input {
        if !inputs.contains(&v.name) {
            return Err(origin.unsupported(Some(v.name.clone()), "a graph input that is not understood"));
        }
        if !caches.contains(v.name.as_str()) {
            continue;
        }
        let ty = v.r#type.as_ref().and_then(|t| t.tensor_type.as_ref()).map_or(0, |t| t.elem_type);
        if !matches!(ty, 1 | 10 | 16) {
            return Err(origin.unsupported(Some(v.name.clone()), format!("a KV cache of ONNX element type {ty}")));
        }
        for (i, want) in [(1, found.kv_heads), (3, found.head_dim)] {
            if let Some(dim) = fixed_dim(v, i).filter(|dim| *dim != want as i64) {
                return Err(origin.format(
                    Some(&v.name),
                    format!(
                        "dimension {i} is {dim}, but attention has {} key heads of {}",
                        found.kv_heads, found.head_dim
                    ),
                ));
            }
        }
    }
    if let Some(missing) = caches.iter().find(|c| !proto.input.iter().any(|v| v.name == **c)) {
        return Err(origin.format(Some(missing), "the cache of a layer is no graph input"));
    }
    let given: HashSet<&str> = proto.output.iter().map(|v| v.name.as_str()).collect();
    match proto.output.iter().find(|v| !outputs.contains(&v.name)) {
        Some(v) => Err(origin.unsupported(Some(v.name.clone()), "a graph output that is not understood")),
        None => match outputs.iter().find(|o| !given.contains(o.as_str())) {
            Some(o) => Err(origin.format(Some(o), "not among the graph's outputs")),
            None => Ok(()),
        },
    }
}

/// What both `genai_config.json` and the graph say must be the same.
fn agree(
    config: &GenaiConfig,
    config_path: &Path,
    found: &FoundDecoder<'_>,
    weights: &Weights<'_>,
    origin: &Origin<'_>,
) -> Result<()> {
    let (m, d) = (&config.model, &config.model.decoder);
    let pairs = [
        ("model.vocab_size", m.vocab_size, found.vocab),
        ("model.decoder.hidden_size", d.hidden_size, found.hidden),
        ("model.decoder.num_hidden_layers", d.num_hidden_layers, found.layers.len()),
        ("model.decoder.num_attention_heads", d.num_attention_heads, found.heads),
        ("model.decoder.num_key_value_heads", d.num_key_value_heads, found.kv_heads),
        ("model.decoder.head_size", d.head_size, found.head_dim),
    ];
    let at = Origin { path: config_path };
    for (key, says, has) in pairs {
        if says != has as u64 {
            return Err(at.format(Some(key), format!("is {says}, but the graph {} has {has}", origin.path.display())));
        }
    }
    if m.context_length == 0 || m.context_length > 1 << 31 {
        return Err(at.format(Some("model.context_length"), format!("is {}", m.context_length)));
    }
    if let RopeTables::Stored { cos, .. } = found.rope.tables {
        let t = weights.tensor(cos);
        if (t.rows as u64) < m.context_length {
            return Err(at.format(
                Some("model.context_length"),
                format!(
                    "is {}, but the rotary table {} of {} has {} positions",
                    m.context_length,
                    t.name,
                    origin.path.display(),
                    t.rows
                ),
            ));
        }
    }
    Ok(())
}

fn special_tokens(config: &GenaiConfig, config_path: &Path, vocab: usize) -> Result<SpecialTokens> {
    let at = Origin { path: config_path };
    let token = |key: &str, id: i64| {
        u32::try_from(id)
            .ok()
            .filter(|t| (*t as usize) < vocab)
            .ok_or_else(|| at.format(Some(key), format!("is {id}, but the vocabulary has {vocab} tokens")))
    };
    let one = |key: &str, id: Option<i64>| match id {
        // The builder writes -1 for "none".
        None | Some(-1) => Ok(None),
        Some(id) => token(key, id).map(Some),
    };
    let m = &config.model;
    let listed = m.eos_token_id.as_ref().map_or_else(Vec::new, config::IntOrList::to_vec);
    let mut eos = Vec::new();
    for id in listed.into_iter().filter(|id| *id != -1) {
        let id = token("model.eos_token_id", id)?;
        if !eos.contains(&id) {
            eos.push(id);
        }
    }
    Ok(SpecialTokens {
        bos: one("model.bos_token_id", m.bos_token_id)?,
        eos,
        pad: one("model.pad_token_id", m.pad_token_id)?,
        add_bos: false,
    })
}
