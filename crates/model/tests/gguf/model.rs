//! Made models: what a sound file becomes, and what a file is refused for that the arithmetic doesn't cover.

use headrace_model::spec::RopeTables;
use headrace_numerics::rope::RopeStyle;

use crate::writer::{FFN, Gguf, HIDDEN, VOCAB, Val};

fn name(m: &headrace_model::gguf::LoadedGguf, id: headrace_model::spec::TensorId) -> &str {
    &m.spec.tensor(id).name
}

#[test]
fn llama_with_a_tied_head() {
    let m = Gguf::tiny("llama").load().unwrap();
    let (spec, c) = (&m.spec, &m.spec.config);
    assert_eq!((c.vocab, c.hidden, c.heads, c.kv_heads, c.head_dim, c.ffn), (10, 8, 2, 1, 4, 12));
    assert_eq!((c.norm_eps, c.max_context), (1e-5, 64));
    assert_eq!((c.rope.style, c.rope.dims), (RopeStyle::Interleaved, 4));
    let tables = RopeTables::Computed { base: 10_000.0, factors: None, position_scale: 1.0 };
    assert_eq!(c.rope.tables, tables);
    assert_eq!(spec.lm_head.weight, spec.embedding);
    assert_eq!(spec.tensors.len(), 11);
    assert_eq!(spec.read_order().len(), spec.tensors.len());
    let layer = &spec.layers[0];
    assert_eq!(layer.attention.scale, 0.5);
    assert_eq!(layer.attention.window, None);
    assert_eq!(name(&m, layer.qkv[2].weight), "blk.0.attn_v.weight");
    assert_eq!(name(&m, layer.down.weight), "blk.0.ffn_down.weight");
    let down = spec.tensor(layer.down.weight);
    assert_eq!((down.rows, down.cols), (HIDDEN as usize, FFN as usize));
    assert_eq!(spec.special.bos, Some(1));
    assert_eq!(spec.special.eos, [2]);
    assert!(!spec.special.add_bos, "byte-level BPE files don't begin with bos unless they say so");
    assert_eq!((m.vocab.tokens.len(), m.vocab.tokens[9].as_str()), (VOCAB as usize, "t9"));
    assert_eq!(spec.name, "made");
}

#[test]
fn a_head_of_its_own_and_its_bias() {
    let mut g = Gguf::tiny("llama");
    g.f16("output.weight", &[HIDDEN, VOCAB]).f32("output.bias", VOCAB);
    let m = g.load().unwrap();
    assert_ne!(m.spec.lm_head.weight, m.spec.embedding);
    assert_eq!(name(&m, m.spec.lm_head.bias.unwrap()), "output.bias");
}

#[test]
fn every_bias_is_kept() {
    let mut g = Gguf::tiny("qwen2");
    for (part, n) in [("attn_output", 8), ("ffn_gate", 12), ("ffn_up", 12), ("ffn_down", 8)] {
        g.f32(&format!("blk.0.{part}.bias"), n);
    }
    let m = g.load().unwrap();
    let layer = &m.spec.layers[0];
    assert_eq!(m.spec.config.rope.style, RopeStyle::Half);
    for linear in layer.qkv.iter().chain([&layer.o]).chain(&layer.gate_up).chain([&layer.down]) {
        let (w, b) = (m.spec.tensor(linear.weight), m.spec.tensor(linear.bias.unwrap()));
        assert_eq!((b.rows, b.cols), (1, w.rows), "{}", b.name);
        assert_eq!(w.name.replace("weight", "bias"), b.name);
    }
}

#[test]
fn a_missing_bias_is_named() {
    for part in ["attn_q", "attn_k", "attn_v"] {
        let bias = format!("blk.0.{part}.bias");
        let mut g = Gguf::tiny("qwen2");
        g.drop_tensor(&bias).refused_format(&[&bias, "missing", "qwen2"]);
    }
    let mut llama = Gguf::tiny("llama");
    llama.f32("blk.0.attn_q.bias", 8).f32("blk.0.attn_v.bias", 4);
    llama.refused_format(&["blk.0.attn_k.bias", "blk.0.attn_q.bias"]);
    llama.f32("blk.0.attn_k.bias", 4).load().unwrap();
    llama.f32("blk.0.ffn_down.bias", 8).refused_format(&["blk.0.ffn_gate.bias", "blk.0.ffn_down.bias"]);
}

#[test]
fn head_norms_belong_to_qwen3() {
    let m = Gguf::tiny("qwen3").load().unwrap();
    let layer = &m.spec.layers[0];
    assert_eq!(name(&m, layer.q_norm.unwrap()), "blk.0.attn_q_norm.weight");
    assert_eq!(name(&m, layer.k_norm.unwrap()), "blk.0.attn_k_norm.weight");
    Gguf::tiny("qwen3")
        .drop_tensor("blk.0.attn_k_norm.weight")
        .refused_format(&["blk.0.attn_k_norm.weight", "missing"]);
    Gguf::tiny("llama").f32("blk.0.attn_q_norm.weight", 4).refused_unsupported(&["attn_q_norm", "no use"]);
}

#[test]
fn fused_qkv() {
    let mut g = Gguf::tiny("llama");
    for part in ["q", "k", "v"] {
        g.drop_tensor(&format!("blk.0.attn_{part}.weight"));
    }
    g.f16("blk.0.attn_qkv.weight", &[HIDDEN, 16]);
    let m = g.load().unwrap();
    assert_eq!(m.spec.layers[0].qkv.len(), 1);
    g.f16("blk.0.attn_q.weight", &[HIDDEN, 8]).refused_unsupported(&["blk.0.attn_q.weight"]);
}

#[test]
fn an_unused_tensor_is_refused() {
    let mut g = Gguf::tiny("llama");
    g.f32("blk.0.attn_norm.bias", HIDDEN).f32("blk.1.attn_norm.weight", HIDDEN);
    g.refused_unsupported(&["blk.0.attn_norm.bias", "no use", "1 more"]);
    Gguf::tiny("llama").f32("blk.0.attn_rot_embd", 2).load().unwrap();
    Gguf::tiny("llama").f32("blk.1.attn_rot_embd", 2).refused_unsupported(&["blk.1.attn_rot_embd"]);
}

#[test]
fn rope_factors_of_llama_3() {
    let mut g = Gguf::tiny("llama");
    let m = g.f32("rope_freqs.weight", 2).load().unwrap();
    let RopeTables::Computed { factors: Some(id), .. } = m.spec.config.rope.tables else { panic!("no factors") };
    assert_eq!(m.spec.extent(m.spec.tensor(id).planes[0].unwrap()), [1f32.to_le_bytes(), 2f32.to_le_bytes()].concat());
    g.tensor("rope_freqs.weight").data[4..].copy_from_slice(&0f32.to_le_bytes());
    g.refused_format(&["rope_freqs.weight", "a factor is 0"]);
    g.tensor("rope_freqs.weight").data[4..].copy_from_slice(&f32::NAN.to_le_bytes());
    g.refused_format(&["rope_freqs.weight", "a factor is NaN"]);
    Gguf::tiny("llama").f32("rope_freqs.weight", 4).refused_format(&["rope_freqs.weight", "[4]", "[2]"]);
    Gguf::tiny("llama").f16("rope_freqs.weight", &[2]).refused_unsupported(&["rope_freqs.weight", "F32"]);
    Gguf::tiny("qwen2").f32("rope_freqs.weight", 2).refused_unsupported(&["rope_freqs.weight", "no use"]);
    for part in ["long", "short"] {
        let name = format!("rope_factors_{part}.weight");
        Gguf::tiny("llama").f32(&name, 2).refused_unsupported(&[&name]);
    }
}

#[test]
fn rope_scaling() {
    let scale = |g: &Gguf| match g.load().unwrap().spec.config.rope.tables {
        RopeTables::Computed { position_scale, .. } => position_scale,
        RopeTables::Stored { .. } => panic!("stored"),
    };
    let mut g = Gguf::tiny("qwen2");
    g.set("qwen2.rope.scaling.factor", Val::F32(4.0));
    assert_eq!(scale(&g), 0.25, "a factor alone is linear scaling");
    g.set("qwen2.rope.scaling.type", Val::Str("linear"));
    assert_eq!(scale(&g), 0.25);
    g.set("qwen2.rope.scaling.type", Val::Str("none"));
    assert_eq!(scale(&g), 1.0);
    for kind in ["yarn", "longrope", "su"] {
        g.set("qwen2.rope.scaling.type", Val::Str(kind));
        g.refused_unsupported(&["qwen2.rope.scaling.type", kind]);
    }
    assert_eq!(scale(Gguf::tiny("llama").set("llama.rope.scale_linear", Val::F32(2.0))), 0.5);
    Gguf::tiny("llama").set("llama.rope.scaling.factor", Val::F32(-1.0)).refused_format(&["rope.scaling.factor", "-1"]);
}

#[test]
fn rope_dimensions_and_base() {
    let mut g = Gguf::tiny("qwen2");
    g.set("qwen2.rope.dimension_count", Val::U32(2)).set("qwen2.rope.freq_base", Val::F32(1e6));
    let rope = g.load().unwrap().spec.config.rope;
    assert_eq!(rope.dims, 2);
    assert!(matches!(rope.tables, RopeTables::Computed { base: 1e6, .. }));
    Gguf::tiny("llama").set("llama.rope.dimension_count", Val::U32(2)).refused_unsupported(&["dimension_count"]);
    for bad in [0, 3, 6] {
        g.set("qwen2.rope.dimension_count", Val::U32(bad)).refused_format(&["dimension_count", &bad.to_string()]);
    }
}

#[test]
fn sliding_windows() {
    let window = |g: &Gguf| g.load().unwrap().spec.layers[0].attention.window;
    let mut g = Gguf::tiny("llama");
    assert_eq!(window(g.set("llama.attention.sliding_window", Val::U32(16))), Some(16));
    assert_eq!(window(g.set("llama.attention.sliding_window", Val::U32(64))), None, "as wide as the context");
    assert_eq!(window(g.set("llama.attention.sliding_window", Val::U32(0))), None);
    g.set("llama.attention.sliding_window", Val::U32(16)).set("llama.attention.sliding_window_pattern", Val::U32(4));
    g.refused_unsupported(&["sliding_window_pattern"]);
    g.set("llama.attention.sliding_window", Val::U32(0)).load().unwrap();
    let mut g = Gguf::tiny("qwen2");
    g.set("qwen2.attention.sliding_window", Val::U32(16)).refused_unsupported(&["qwen2.attention.sliding_window"]);
}

#[test]
fn keys_that_change_the_arithmetic() {
    for (key, neutral, other) in [
        ("logit_scale", 1.0, 0.0625),
        ("attn_logit_softcapping", 0.0, 50.0),
        ("final_logit_softcapping", 0.0, 30.0),
        ("residual_scale", 1.0, 0.22),
        ("embedding_scale", 1.0, 12.0),
        ("attention.scale", 0.0, 0.1),
        ("attention.max_alibi_bias", 0.0, 8.0),
        ("attention.clamp_kqv", 0.0, 8.0),
        ("rope.scaling.attn_factor", 1.0, 1.1),
    ] {
        let key = format!("llama.{key}");
        Gguf::tiny("llama").set(&key, Val::F32(neutral)).load().unwrap();
        Gguf::tiny("llama").set(&key, Val::F32(other)).refused_unsupported(&[&key, "changes the arithmetic"]);
        Gguf::tiny("llama").set(&key, Val::F32(f32::NAN)).refused_unsupported(&[&key]);
    }
    let mut g = Gguf::tiny("llama");
    g.set("llama.expert_count", Val::U32(0)).set("llama.attention.causal", Val::Bool(true)).load().unwrap();
    g.set("llama.expert_count", Val::U32(8)).refused_unsupported(&["llama.expert_count", "mixture-of-experts"]);
    Gguf::tiny("llama").set("llama.attention.causal", Val::Bool(false)).refused_unsupported(&["causal"]);
    Gguf::tiny("llama").set("llama.hidden_act", Val::Str("gelu")).refused_unsupported(&["hidden_act", "gelu"]);
    Gguf::tiny("llama").set("llama.hidden_act", Val::Str("silu")).load().unwrap();
    Gguf::tiny("qwen2").set("qwen2.rope.dimension_sections", Val::I32s(vec![0; 4])).load().unwrap();
    let mut g = Gguf::tiny("qwen2");
    g.set("qwen2.rope.dimension_sections", Val::I32s(vec![1, 1, 0, 0])).refused_unsupported(&["dimension_sections"]);
}

#[test]
fn other_kinds_of_file() {
    let mut g = Gguf::tiny("llama");
    g.set("somebody.knows.this", Val::Bool(true)).set("llama.unheard_of", Val::U32(7)).load().unwrap();
    g.set("general.type", Val::Str("adapter")).refused_unsupported(&["general.type", "adapter"]);
    Gguf::tiny("gemma3").refused_unsupported(&["general.architecture", "gemma3"]);
    Gguf::tiny("llama").unset("general.architecture").refused_format(&["general.architecture", "missing"]);
    Gguf::tiny("llama").set("general.quantization_version", Val::U32(1)).refused_unsupported(&["quantization_version"]);
    Gguf::tiny("llama").set("split.count", Val::U16(2)).refused_unsupported(&["split.count", "one shard of 2"]);
}

#[test]
fn sizes_out_of_bounds() {
    let cases: &[(&str, u32, &str)] = &[
        ("attention.head_count", 0, "is 0"),
        ("attention.head_count_kv", 0, "is 0"),
        ("attention.head_count", 100_000_000, "is 100000000"),
        ("attention.head_count", 3, "multiple of 3"),
        ("embedding_length", 16, "dimensions [8, 10]"),
        ("embedding_length", 0, "is 0"),
        ("feed_forward_length", 13, "blk.0.ffn_gate.weight"),
        ("block_count", 0, "is 0"),
        ("block_count", 60_000, "blk.1.attn_q.weight: tensor missing"),
        ("block_count", 4_000_000_000, "is 4000000000"),
        ("context_length", 0, "is 0"),
        ("context_length", u32::MAX, "is 4294967295"),
        ("vocab_size", 11, "10 rows"),
        ("attention.key_length", 6, "blk.0.attn_q.weight"),
    ];
    for (key, n, part) in cases {
        Gguf::tiny("llama").set(&format!("llama.{key}"), Val::U32(*n)).refused_format(&[part]);
    }
    let mut g = Gguf::tiny("llama");
    g.set("llama.attention.head_count", Val::U32(4)).set("llama.attention.head_count_kv", Val::U32(3));
    g.refused_format(&["head_count_kv", "4 query heads", "3 key"]);
    for dim in [0u32, 5, 514, 100_000, u32::MAX] {
        let mut g = Gguf::tiny("llama");
        g.set("llama.attention.key_length", Val::U32(dim)).refused_unsupported(&[
            "key_length",
            &dim.to_string(),
            "512",
        ]);
    }
    let mut g = Gguf::tiny("llama");
    g.set("llama.attention.value_length", Val::U32(8)).refused_unsupported(&["value_length", "8"]);
    for eps in [f32::NAN, f32::INFINITY, -1e-5, 1.0] {
        let mut g = Gguf::tiny("llama");
        g.set("llama.attention.layer_norm_rms_epsilon", Val::F32(eps))
            .refused_format(&["epsilon", &f64::from(eps).to_string()]);
    }
    for base in [f32::NAN, 0.0, -1.0, f32::NEG_INFINITY] {
        Gguf::tiny("llama").set("llama.rope.freq_base", Val::F32(base)).refused_format(&["freq_base"]);
    }
    for key in ["block_count", "embedding_length", "attention.head_count", "attention.layer_norm_rms_epsilon"] {
        let key = format!("llama.{key}");
        Gguf::tiny("llama").unset(&key).refused_format(&[&key, "missing"]);
        Gguf::tiny("llama").set(&key, Val::Str("many")).refused_format(&[&key, "is a string"]);
        Gguf::tiny("llama").set(&key, Val::I32(-5)).refused_format(&[&key]);
    }
}

#[test]
fn sizes_given_a_layer() {
    let mut g = Gguf::tiny("llama");
    g.set("llama.attention.head_count_kv", Val::I32s(vec![1])).load().unwrap();
    g.set("llama.attention.head_count_kv", Val::I32s(vec![1, 1])).refused_format(&["2 numbers for 1 layers"]);
    g.set("llama.attention.head_count_kv", Val::I32s(vec![-1])).refused_format(&["head_count_kv", "not negative"]);
    g.set("llama.attention.head_count_kv", Val::F32s(vec![1.0])).refused_format(&["head_count_kv", "integers"]);
    g.set("llama.block_count", Val::U32(2)).set("llama.attention.head_count_kv", Val::I32s(vec![1, 2]));
    g.refused_unsupported(&["head_count_kv", "different shapes"]);
}

#[test]
fn wrong_shapes_and_types() {
    let mut g = Gguf::tiny("llama");
    g.tensor("blk.0.attn_k.weight").dims = vec![4, HIDDEN];
    g.refused_format(&["blk.0.attn_k.weight", "[4, 8]", "[8, 4]"]);
    g.tensor("blk.0.attn_k.weight").dims = vec![32];
    g.refused_format(&["blk.0.attn_k.weight", "[32]"]);
    g.tensor("blk.0.attn_k.weight").dims = vec![HIDDEN, 4, 1, 1];
    g.load().unwrap();
    g.tensor("blk.0.attn_k.weight").dims = vec![HIDDEN, 2, 2];
    g.refused_format(&["blk.0.attn_k.weight", "[8, 2, 2]"]);
    let mut g = Gguf::tiny("llama");
    g.tensor("token_embd.weight").dims = vec![80];
    g.refused_format(&["token_embd.weight", "matrix"]);
    Gguf::tiny("llama").drop_tensor("token_embd.weight").refused_format(&["token_embd.weight", "missing"]);
    Gguf::tiny("llama").drop_tensor("blk.0.ffn_up.weight").refused_format(&["blk.0.ffn_up.weight", "missing"]);
    let mut g = Gguf::tiny("llama");
    g.drop_tensor("output_norm.weight").set("llama.embedding_length", Val::U32(32));
    g.set("llama.attention.key_length", Val::U32(4));
    for t in &mut g.tensors {
        t.dims.iter_mut().filter(|d| **d == HIDDEN).for_each(|d| *d = 32);
        t.data.resize(t.dims.iter().product::<u64>() as usize * 4, 0);
    }
    g.tensor("blk.0.attn_q.weight").dims = vec![32, 8];
    g.tensor("blk.0.attn_output.weight").dims = vec![8, 32];
    g.add("output_norm.weight", &[32], 8, 34);
    g.refused_unsupported(&["output_norm.weight", "Q8_0"]);
}

#[test]
fn vocabularies() {
    let mut g = Gguf::tiny("llama");
    g.set("tokenizer.ggml.tokens", Val::Strs(vec!["a".into(); 9])).refused_format(&["tokens", "9 tokens", "10 rows"]);
    let mut g = Gguf::tiny("llama");
    g.set("tokenizer.ggml.token_type", Val::I32s(vec![1; 10])).set("tokenizer.ggml.scores", Val::F32s(vec![0.5; 10]));
    g.set("tokenizer.ggml.merges", Val::Strs(vec!["a b".into()])).set("tokenizer.ggml.eot_token_id", Val::U32(7));
    g.set("tokenizer.ggml.eom_token_id", Val::U32(2)).set("tokenizer.ggml.unknown_token_id", Val::I32(-1));
    g.set("tokenizer.ggml.padding_token_id", Val::U32(u32::MAX)).set("tokenizer.ggml.model", Val::Str("llama"));
    g.set("tokenizer.ggml.add_eos_token", Val::Bool(false)).set("tokenizer.chat_template", Val::Str("{{ x }}"));
    let m = g.load().unwrap();
    assert_eq!((&m.vocab.token_types, &m.vocab.scores), (&vec![1; 10], &vec![0.5; 10]));
    assert_eq!((m.vocab.merges.as_slice(), m.vocab.extra_eos.as_slice()), (&["a b".to_owned()][..], &[7, 2][..]));
    assert_eq!((m.vocab.unk, m.vocab.pad, m.vocab.add_eos), (None, None, Some(false)));
    assert_eq!(m.vocab.chat_template.as_deref(), Some("{{ x }}"));
    assert_eq!(m.spec.special.eos, [2, 7]);
    assert!(m.spec.special.add_bos, "sentencepiece files begin with bos unless they say otherwise");
    g.set("tokenizer.ggml.add_bos_token", Val::Bool(false));
    assert!(!g.load().unwrap().spec.special.add_bos);
    g.set("tokenizer.ggml.eot_token_id", Val::U32(10)).refused_format(&["eot_token_id", "10 tokens"]);
    let mut g = Gguf::tiny("llama");
    g.set("tokenizer.ggml.padding_token_id", Val::U32(10)).set("tokenizer.ggml.unknown_token_id", Val::U32(9));
    let m = g.load().unwrap();
    assert_eq!((m.vocab.pad, m.spec.special.pad, m.vocab.unk), (None, None, Some(9)));
    let mut g = Gguf::tiny("llama");
    g.set("tokenizer.ggml.pre", Val::Str("llama-bpe"));
    assert!(g.load().unwrap().spec.special.add_bos);
    g.set("tokenizer.ggml.bos_token_id", Val::U64(1 << 40)).refused_format(&["bos_token_id", "32 bits"]);
    Gguf::tiny("llama").set("tokenizer.ggml.tokens", Val::I32s(vec![1; 10])).refused_format(&["tokens", "strings"]);
    let mut g = Gguf::tiny("llama");
    g.set("tokenizer.ggml.token_type", Val::F32s(vec![1.0; 10])).refused_format(&["token_type", "integers"]);
    let mut g = Gguf::tiny("llama");
    let m = g.unset("tokenizer.ggml.tokens").unset("tokenizer.ggml.model").load().unwrap();
    assert_eq!((m.vocab.model.as_str(), m.vocab.tokens.len(), m.spec.config.vocab), ("none", 0, 10));
}
