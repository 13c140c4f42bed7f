//! Metadata of a supported architecture to sizes and constants, every one checked.

use headrace_numerics::rope::RopeStyle;

use crate::error::Result;
use crate::gguf::header::GgufFile;
use crate::gguf::value::Value;
use crate::gguf::{fault, keys};

/// Largest head that is supported.
pub const MAX_HEAD_DIM: u64 = 512;
/// Larger counts of heads, layers and elements are taken for damage.
const MAX_HEADS: u64 = 1 << 16;
const MAX_LAYERS: u64 = 1 << 16;
const MAX_WIDTH: u64 = 1 << 24;
const MAX_CONTEXT: u64 = i32::MAX as u64;

/// A supported architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arch {
    Llama,
    Qwen2,
    Qwen3,
}

impl Arch {
    /// Reads `general.architecture`, and refuses files that are no model of a supported one.
    pub fn read(file: &GgufFile) -> Result<Arch> {
        const KEY: &str = "general.architecture";
        let name = file.string(KEY)?.ok_or_else(|| file.key_error(KEY, "metadata key missing"))?;
        if let Some(kind) = file.string("general.type")?
            && kind != "model"
        {
            let what = format!("`{}`, not a model that can be run by itself", fault::shown(kind));
            return Err(file.key_unsupported("general.type", what));
        }
        match name {
            "llama" => Ok(Arch::Llama),
            "qwen2" => Ok(Arch::Qwen2),
            "qwen3" => Ok(Arch::Qwen3),
            other => {
                let what =
                    format!("architecture `{}` is not supported; llama, qwen2 and qwen3 are", fault::shown(other));
                Err(file.key_unsupported(KEY, what))
            }
        }
    }

    /// Name in the file, and prefix of its keys.
    pub const fn name(self) -> &'static str {
        match self {
            Arch::Llama => "llama",
            Arch::Qwen2 => "qwen2",
            Arch::Qwen3 => "qwen3",
        }
    }

    /// Pairing of a head's elements. Files of `llama` have the rows of q and k in interleaved order.
    pub const fn rope_style(self) -> RopeStyle {
        match self {
            Arch::Llama => RopeStyle::Interleaved,
            Arch::Qwen2 | Arch::Qwen3 => RopeStyle::Half,
        }
    }
}

/// Sizes and constants of the model as the metadata gives them.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Hparams {
    pub arch: Arch,
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ffn: usize,
    pub norm_eps: f32,
    pub max_context: usize,
    pub rope_dims: usize,
    pub rope_base: f64,
    pub position_scale: f64,
    pub window: Option<usize>,
    /// Vocabulary size, where the file says one.
    pub vocab: Option<u64>,
}

/// Keys of one architecture.
struct Keys<'a> {
    file: &'a GgufFile,
    arch: &'static str,
}

impl Keys<'_> {
    fn name(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.arch)
    }

    /// A size in `1..=max`.
    fn size(&self, suffix: &str, max: u64, default: Option<u64>) -> Result<usize> {
        let key = self.name(suffix);
        self.in_range(&key, self.file.uint(&key)?, max, default)
    }

    fn in_range(&self, key: &str, value: Option<u64>, max: u64, default: Option<u64>) -> Result<usize> {
        match value.or(default) {
            None => Err(self.file.key_error(key, "metadata key missing")),
            Some(n) if (1..=max).contains(&n) => Ok(n as usize),
            Some(n) => Err(self.file.key_error(key, format!("is {n}; 1 to {max} are possible"))),
        }
    }

    /// A size that may be given a layer: one number, or as many equal numbers as there are layers.
    fn layered(&self, suffix: &str, layers: usize, max: u64, default: Option<u64>) -> Result<usize> {
        let key = self.name(suffix);
        if !matches!(self.file.value(&key), Some(Value::Array(_))) {
            return self.size(suffix, max, default);
        }
        let Some(view) = self.file.array(&key)? else { return self.size(suffix, max, default) };
        if view.len() != layers {
            return Err(self.file.key_error(&key, format!("{} numbers for {layers} layers", view.len())));
        }
        let mut numbers = view.scalars().map(|v| match v {
            Value::Uint(n) => Some(n),
            Value::Int(n) => u64::try_from(n).ok(),
            _ => None,
        });
        let Some(Some(first)) = numbers.next() else {
            return Err(self.file.key_error(&key, "should hold integers that are not negative"));
        };
        if numbers.any(|n| n != Some(first)) {
            return Err(self.file.key_unsupported(&key, "layers of different shapes are not supported"));
        }
        self.in_range(&key, Some(first), max, default)
    }

    fn positive(&self, suffix: &str) -> Result<Option<f64>> {
        let key = self.name(suffix);
        match self.file.float(&key)? {
            Some(x) if x <= 0.0 => Err(self.file.key_error(&key, format!("is {x}; it must be greater than 0"))),
            x => Ok(x),
        }
    }
}

impl Hparams {
    /// Reads the metadata of the (first shard of the) model.
    pub fn read(file: &GgufFile) -> Result<Hparams> {
        let arch = Arch::read(file)?;
        check_quantisation_version(file)?;
        keys::check(file, arch.name())?;
        let k = Keys { file, arch: arch.name() };
        let layers = k.size("block_count", MAX_LAYERS, None)?;
        let hidden = k.size("embedding_length", MAX_WIDTH, None)?;
        let heads = k.layered("attention.head_count", layers, MAX_HEADS, None)?;
        let kv_heads = k.layered("attention.head_count_kv", layers, MAX_HEADS, Some(heads as u64))?;
        if !heads.is_multiple_of(kv_heads) {
            let what = format!("{heads} query heads are no multiple of {kv_heads} key and value heads");
            return Err(file.key_error(&k.name("attention.head_count_kv"), what));
        }
        let max_context = k.size("context_length", MAX_CONTEXT, None)?;
        let head_dim = head_dim(&k, hidden, heads)?;
        Ok(Hparams {
            arch,
            layers,
            hidden,
            heads,
            kv_heads,
            head_dim,
            ffn: k.layered("feed_forward_length", layers, MAX_WIDTH, None)?,
            norm_eps: norm_eps(&k)?,
            max_context,
            rope_dims: rope_dims(&k, arch, head_dim)?,
            rope_base: k.positive("rope.freq_base")?.unwrap_or(10_000.0),
            position_scale: position_scale(&k)?,
            window: window(&k, arch, max_context)?,
            vocab: file.uint(&k.name("vocab_size"))?,
        })
    }
}

/// Block layouts changed with version 2; nothing of version 1 was ever written as GGUF version 2 or 3.
fn check_quantisation_version(file: &GgufFile) -> Result<()> {
    const KEY: &str = "general.quantization_version";
    match file.uint(KEY)? {
        None | Some(2) => Ok(()),
        Some(n) => Err(file.key_unsupported(KEY, format!("is {n}; only version 2 is supported"))),
    }
}

fn head_dim(k: &Keys<'_>, hidden: usize, heads: usize) -> Result<usize> {
    let key = k.name("attention.key_length");
    let given = k.file.uint(&key)?;
    if given.is_none() && !hidden.is_multiple_of(heads) {
        let what = format!("missing, and embedding_length {hidden} is no multiple of {heads} heads");
        return Err(k.file.key_error(&key, what));
    }
    let dim = given.unwrap_or((hidden / heads) as u64);
    if !(1..=MAX_HEAD_DIM).contains(&dim) || !dim.is_multiple_of(2) {
        let source = if given.is_some() { "" } else { " (embedding_length / head_count)" };
        let what = format!("heads of {dim} elements{source}; even sizes of 2 to {MAX_HEAD_DIM} are supported");
        return Err(k.file.key_unsupported(&key, what));
    }
    let key = k.name("attention.value_length");
    match k.file.uint(&key)? {
        Some(v) if v != dim => {
            Err(k.file.key_unsupported(&key, format!("values of {v} elements with keys of {dim} are not supported")))
        }
        _ => Ok(dim as usize),
    }
}

fn norm_eps(k: &Keys<'_>) -> Result<f32> {
    let key = k.name("attention.layer_norm_rms_epsilon");
    let eps = k.file.float(&key)?.ok_or_else(|| k.file.key_error(&key, "metadata key missing"))?;
    if !(0.0..1.0).contains(&eps) {
        return Err(k.file.key_error(&key, format!("is {eps}; 0 to 1 is possible")));
    }
    Ok(eps as f32)
}

fn rope_dims(k: &Keys<'_>, arch: Arch, head_dim: usize) -> Result<usize> {
    let key = k.name("rope.dimension_count");
    let dims = k.file.uint(&key)?.unwrap_or(head_dim as u64);
    if dims == 0 || !dims.is_multiple_of(2) || dims > head_dim as u64 {
        return Err(k.file.key_error(&key, format!("is {dims}; even numbers of 2 to {head_dim} are possible")));
    }
    if arch == Arch::Llama && dims != head_dim as u64 {
        let what =
            format!("{dims} rotated elements of heads of {head_dim}: partial rotation is not supported for llama");
        return Err(k.file.key_unsupported(&key, what));
    }
    Ok(dims as usize)
}

/// Factor of every position. A factor without a type means linear scaling, as in files from before the type existed.
fn position_scale(k: &Keys<'_>) -> Result<f64> {
    let type_key = k.name("rope.scaling.type");
    match k.file.string(&type_key)? {
        None | Some("linear") => {}
        Some("none") => return Ok(1.0),
        Some(other) => {
            let what = format!("rope scaling `{}` is not supported; none and linear are", fault::shown(other));
            return Err(k.file.key_unsupported(&type_key, what));
        }
    }
    let mut factor = 1.0;
    for suffix in ["rope.scaling.factor", "rope.scale_linear"] {
        let key = k.name(suffix);
        match k.file.float(&key)? {
            None => continue,
            // 0 stands for "not set".
            Some(0.0) => {}
            Some(x) if x > 0.0 => factor = x,
            Some(x) => return Err(k.file.key_error(&key, format!("is {x}; it must be greater than 0"))),
        }
        break;
    }
    let scale = 1.0 / factor;
    if !scale.is_finite() || scale == 0.0 {
        return Err(k.file.key_error(&k.name("rope.scaling.factor"), format!("is {factor}, out of any reason")));
    }
    Ok(scale)
}

/// Positions that attention sees. A window as wide as the context is none.
fn window(k: &Keys<'_>, arch: Arch, max_context: usize) -> Result<Option<usize>> {
    let key = k.name("attention.sliding_window");
    match k.file.uint(&key)? {
        None | Some(0) => Ok(None),
        Some(w) if w >= max_context as u64 => Ok(None),
        Some(w) if arch == Arch::Llama => {
            let pattern = k.name("attention.sliding_window_pattern");
            match k.file.value(&pattern) {
                None => Ok(Some(w as usize)),
                Some(_) => Err(k.file.key_unsupported(&pattern, "a window in some layers only is not supported")),
            }
        }
        Some(w) => {
            let what = format!("a window of {w} positions: which layers of {} have it is not in the file", arch.name());
            Err(k.file.key_unsupported(&key, what))
        }
    }
}
