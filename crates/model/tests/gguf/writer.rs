//! A small GGUF writer for tests: valid models of a few hundred bytes, and every way to break them.

use headrace_model::gguf::{LoadedGguf, parse_bytes};
use headrace_model::{ModelError, Result};

/// A metadata value.
#[derive(Clone)]
pub enum Val {
    U16(u16),
    U32(u32),
    I32(i32),
    U64(u64),
    F32(f32),
    F64(f64),
    Bool(bool),
    Str(&'static str),
    Strs(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    /// Type number and the bytes after it.
    Raw(u32, Vec<u8>),
}

/// A tensor.
#[derive(Clone)]
pub struct Tensor {
    pub name: Vec<u8>,
    /// Innermost first.
    pub dims: Vec<u64>,
    pub type_id: u32,
    pub data: Vec<u8>,
    /// Offset to write instead of the right one.
    pub offset: Option<u64>,
}

/// A file to be written.
#[derive(Clone)]
pub struct Gguf {
    pub magic: [u8; 4],
    pub version: u32,
    pub entries: Vec<(Vec<u8>, Val)>,
    pub tensors: Vec<Tensor>,
    pub alignment: usize,
    /// Counts to write instead of the right ones.
    pub tensor_count: Option<u64>,
    pub entry_count: Option<u64>,
}

pub fn string(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text);
}

impl Val {
    fn write(&self, out: &mut Vec<u8>) {
        let head = |out: &mut Vec<u8>, id: u32| out.extend(id.to_le_bytes());
        let array = |out: &mut Vec<u8>, id: u32, n: usize| {
            out.extend(9u32.to_le_bytes());
            out.extend(id.to_le_bytes());
            out.extend((n as u64).to_le_bytes());
        };
        match self {
            Val::U16(v) => {
                head(out, 2);
                out.extend(v.to_le_bytes());
            }
            Val::U32(v) => {
                head(out, 4);
                out.extend(v.to_le_bytes());
            }
            Val::I32(v) => {
                head(out, 5);
                out.extend(v.to_le_bytes());
            }
            Val::U64(v) => {
                head(out, 10);
                out.extend(v.to_le_bytes());
            }
            Val::F32(v) => {
                head(out, 6);
                out.extend(v.to_le_bytes());
            }
            Val::F64(v) => {
                head(out, 12);
                out.extend(v.to_le_bytes());
            }
            Val::Bool(v) => {
                head(out, 7);
                out.push(u8::from(*v));
            }
            Val::Str(v) => {
                head(out, 8);
                string(out, v.as_bytes());
            }
            Val::Strs(v) => {
                array(out, 8, v.len());
                v.iter().for_each(|s| string(out, s.as_bytes()));
            }
            Val::I32s(v) => {
                array(out, 5, v.len());
                v.iter().for_each(|x| out.extend(x.to_le_bytes()));
            }
            Val::F32s(v) => {
                array(out, 6, v.len());
                v.iter().for_each(|x| out.extend(x.to_le_bytes()));
            }
            Val::Raw(id, bytes) => {
                head(out, *id);
                out.extend(bytes);
            }
        }
    }
}

/// Layer and head sizes of the made models: hidden 8, 2 query heads and 1 key head of 4, feed-forward 12, 10 tokens.
pub const HIDDEN: u64 = 8;
pub const FFN: u64 = 12;
pub const VOCAB: u64 = 10;

impl Gguf {
    /// A file with metadata and tensors still to be added.
    pub fn empty() -> Gguf {
        Gguf {
            magic: *b"GGUF",
            version: 3,
            entries: Vec::new(),
            tensors: Vec::new(),
            alignment: 32,
            tensor_count: None,
            entry_count: None,
        }
    }

    /// A valid model of one layer with F16 matrices, F32 norms and a tied head.
    pub fn tiny(arch: &'static str) -> Gguf {
        let mut g = Gguf::empty();
        g.set("general.architecture", Val::Str(arch));
        for (key, n) in [
            ("block_count", 1),
            ("context_length", 64),
            ("embedding_length", HIDDEN as u32),
            ("feed_forward_length", FFN as u32),
            ("attention.head_count", 2),
            ("attention.head_count_kv", 1),
        ] {
            g.set(&format!("{arch}.{key}"), Val::U32(n));
        }
        g.set(&format!("{arch}.attention.layer_norm_rms_epsilon"), Val::F32(1e-5));
        g.set("tokenizer.ggml.model", Val::Str("gpt2"));
        g.set("tokenizer.ggml.tokens", Val::Strs((0..VOCAB).map(|i| format!("t{i}")).collect()));
        g.set("tokenizer.ggml.bos_token_id", Val::U32(1));
        g.set("tokenizer.ggml.eos_token_id", Val::U32(2));
        g.f16("token_embd.weight", &[HIDDEN, VOCAB]);
        g.f32("blk.0.attn_norm.weight", HIDDEN);
        g.f16("blk.0.attn_q.weight", &[HIDDEN, 8]);
        g.f16("blk.0.attn_k.weight", &[HIDDEN, 4]);
        g.f16("blk.0.attn_v.weight", &[HIDDEN, 4]);
        if arch == "qwen2" {
            g.f32("blk.0.attn_q.bias", 8).f32("blk.0.attn_k.bias", 4).f32("blk.0.attn_v.bias", 4);
        }
        if arch == "qwen3" {
            g.f32("blk.0.attn_q_norm.weight", 4);
            g.f32("blk.0.attn_k_norm.weight", 4);
        }
        g.f16("blk.0.attn_output.weight", &[8, HIDDEN]);
        g.f32("blk.0.ffn_norm.weight", HIDDEN);
        g.f16("blk.0.ffn_gate.weight", &[HIDDEN, FFN]);
        g.f16("blk.0.ffn_up.weight", &[HIDDEN, FFN]);
        g.f16("blk.0.ffn_down.weight", &[FFN, HIDDEN]);
        g.f32("output_norm.weight", HIDDEN);
        g
    }

    /// Sets a key, in the place where it was if it was there.
    pub fn set(&mut self, key: &str, val: Val) -> &mut Gguf {
        match self.entries.iter_mut().find(|(k, _)| k == key.as_bytes()) {
            Some(entry) => entry.1 = val,
            None => self.entries.push((key.as_bytes().to_vec(), val)),
        }
        self
    }

    /// Removes a key that must be there.
    pub fn unset(&mut self, key: &str) -> &mut Gguf {
        let before = self.entries.len();
        self.entries.retain(|(k, _)| k != key.as_bytes());
        assert_eq!(self.entries.len() + 1, before, "{key}");
        self
    }

    /// Adds a tensor whose bytes count up.
    pub fn add(&mut self, name: &str, dims: &[u64], type_id: u32, len: usize) -> &mut Gguf {
        let data = (0..len).map(|i| (i % 60) as u8).collect();
        let (name, dims) = (name.as_bytes().to_vec(), dims.to_vec());
        self.tensors.push(Tensor { name, dims, type_id, data, offset: None });
        self
    }

    pub fn f16(&mut self, name: &str, dims: &[u64]) -> &mut Gguf {
        self.add(name, dims, 1, dims.iter().product::<u64>() as usize * 2)
    }

    pub fn f32(&mut self, name: &str, len: u64) -> &mut Gguf {
        self.add(name, &[len], 0, len as usize * 4);
        self.tensors.last_mut().unwrap().data = (0..len).flat_map(|i| (1.0 + i as f32).to_le_bytes()).collect();
        self
    }

    /// A tensor that must be there.
    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name.as_bytes()).unwrap()
    }

    /// Removes a tensor that must be there.
    pub fn drop_tensor(&mut self, name: &str) -> &mut Gguf {
        self.tensor(name);
        self.tensors.retain(|t| t.name != name.as_bytes());
        self
    }

    /// The file's bytes.
    pub fn build(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.entry_count.unwrap_or(self.entries.len() as u64).to_le_bytes());
        for (key, val) in &self.entries {
            string(&mut out, key);
            val.write(&mut out);
        }
        let mut at = 0usize;
        for t in &self.tensors {
            string(&mut out, &t.name);
            out.extend((t.dims.len() as u32).to_le_bytes());
            t.dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(t.type_id.to_le_bytes());
            out.extend(t.offset.unwrap_or(at as u64).to_le_bytes());
            at = (at + t.data.len()).next_multiple_of(self.alignment);
        }
        for t in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
            out.extend(&t.data);
        }
        out
    }

    pub fn load(&self) -> Result<LoadedGguf> {
        parse_bytes("made.gguf", self.build())
    }

    /// Asserts that loading fails with a `Format` error whose message contains `parts`.
    #[track_caller]
    pub fn refused_format(&self, parts: &[&str]) {
        expect(self.load(), Kind::Format, parts);
    }

    /// Asserts that loading fails with an `Unsupported` error whose message contains `parts`.
    #[track_caller]
    pub fn refused_unsupported(&self, parts: &[&str]) {
        expect(self.load(), Kind::Unsupported, parts);
    }
}

/// Variant of an error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Io,
    Format,
    Unsupported,
}

/// Asserts that `result` is an error of kind `kind` whose message contains all of `parts`.
#[track_caller]
pub fn expect(result: Result<LoadedGguf>, kind: Kind, parts: &[&str]) {
    let error = match result {
        Ok(_) => panic!("loaded, but should be refused with {parts:?}"),
        Err(e) => e,
    };
    let got = match &error {
        ModelError::Io { .. } => Kind::Io,
        ModelError::Format { .. } => Kind::Format,
        ModelError::Unsupported { .. } => Kind::Unsupported,
        _ => panic!("unknown variant: {error}"),
    };
    let text = error.to_string();
    assert_eq!(got, kind, "{text}");
    for part in parts {
        assert!(text.contains(part), "`{text}` does not contain `{part}`");
    }
    assert!(text.len() < 1000, "a message of {} bytes", text.len());
}
