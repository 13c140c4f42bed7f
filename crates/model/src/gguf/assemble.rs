//! A GGUF model's shards to a [`ModelSpec`]: layer by layer, every tensor accounted for.

use headrace_numerics::attention::AttentionParams;

use crate::error::Result;
use crate::families;
use crate::gguf::header::GgufFile;
use crate::gguf::hparams::{Arch, Hparams};
use crate::gguf::tensors::Tensors;
use crate::spec::{DecoderConfig, Layer, Linear, ModelSpec, Rope, RopeTables, SpecialTokens, TensorId};

/// Divisors of the rotary embedding's angular steps (Llama 3).
const ROPE_FREQS: &str = "rope_freqs.weight";

/// Builds the model from its shards. `special` are the special tokens of its vocabulary, `vocab_len` the number of
/// tokens that the vocabulary lists, 0 if there is none.
pub(super) fn assemble(shards: &[GgufFile], special: SpecialTokens, vocab_len: usize) -> Result<ModelSpec> {
    let [first, ..] = shards else {
        return Err(crate::gguf::fault::format("".as_ref(), None, None, "no file"));
    };
    let hp = Hparams::read(first)?;
    let mut t = Tensors::new(shards)?;
    let vocab = vocab(first, &t, &hp, vocab_len)?;
    let embedding = t.matrix("token_embd.weight", vocab, hp.hidden)?;
    let rope = rope(&mut t, &hp)?;
    let mut layers = Vec::new();
    for i in 0..hp.layers {
        layers.push(layer(&mut t, &hp, i)?);
    }
    let final_norm = t.vector("output_norm.weight", hp.hidden)?;
    let head = t.try_matrix("output.weight", vocab, hp.hidden)?.unwrap_or(embedding);
    let lm_head = Linear { weight: head, bias: t.try_vector("output.bias", vocab)? };
    t.all_used(|name| is_precomputed(name, hp.layers))?;
    let stem = first.file.path.file_stem().map(|s| s.to_string_lossy().into_owned());
    let spec = ModelSpec {
        container: "gguf",
        name: first.string("general.name")?.map(str::to_owned).or(stem).unwrap_or_default(),
        config: DecoderConfig {
            arch: hp.arch.name().to_owned(),
            vocab,
            hidden: hp.hidden,
            heads: hp.heads,
            kv_heads: hp.kv_heads,
            head_dim: hp.head_dim,
            ffn: hp.ffn,
            norm_eps: hp.norm_eps,
            max_context: hp.max_context,
            rope,
        },
        embedding,
        layers,
        final_norm,
        lm_head,
        tensors: t.tensors,
        files: t.files,
        special,
    };
    families::check(&first.file.path, &spec)?;
    Ok(spec)
}

/// Rows of the embedding, which the vocabulary's length and the metadata must agree with.
fn vocab(first: &GgufFile, t: &Tensors<'_>, hp: &Hparams, listed: usize) -> Result<usize> {
    const EMBEDDING: &str = "token_embd.weight";
    let rows = match t.info(EMBEDDING).map(|i| i.dims.as_slice()) {
        Some([_, rows, ..]) => *rows,
        Some(_) => return Err(t.fault(EMBEDDING, "the embedding should be a matrix, but has one dimension")),
        None => return Err(t.fault(EMBEDDING, "tensor missing")),
    };
    if listed != 0 && listed != rows {
        let what = format!("{listed} tokens, but the embedding has {rows} rows");
        return Err(first.key_error("tokenizer.ggml.tokens", what));
    }
    match hp.vocab {
        Some(n) if n != rows as u64 => {
            let what = format!("is {n}, but the embedding has {rows} rows");
            Err(first.key_error(&format!("{}.vocab_size", hp.arch.name()), what))
        }
        _ => Ok(rows),
    }
}

fn rope(t: &mut Tensors<'_>, hp: &Hparams) -> Result<Rope> {
    // Only llama files have them; elsewhere the tensor stays unused and so is refused.
    let factors = if hp.arch == Arch::Llama { t.try_vector(ROPE_FREQS, hp.rope_dims / 2)? } else { None };
    if let Some(id) = factors
        && let Some(bad) = t.floats(id)?.into_iter().find(|f| !f.is_finite() || *f <= 0.0)
    {
        return Err(t.fault(ROPE_FREQS, format!("a factor is {bad}; they must be finite and greater than 0")));
    }
    let tables = RopeTables::Computed { base: hp.rope_base, factors, position_scale: hp.position_scale };
    Ok(Rope { style: hp.arch.rope_style(), dims: hp.rope_dims, tables })
}

fn layer(t: &mut Tensors<'_>, hp: &Hparams, i: usize) -> Result<Layer> {
    let name = |part: &str| format!("blk.{i}.{part}");
    let (q, kv) = (hp.heads * hp.head_dim, hp.kv_heads * hp.head_dim);
    let qkv = if t.info(&name("attn_qkv.weight")).is_some() {
        vec![t.linear(&name("attn_qkv"), q + 2 * kv, hp.hidden)?]
    } else {
        vec![
            t.linear(&name("attn_q"), q, hp.hidden)?,
            t.linear(&name("attn_k"), kv, hp.hidden)?,
            t.linear(&name("attn_v"), kv, hp.hidden)?,
        ]
    };
    let head_norm = |t: &mut Tensors<'_>, part| -> Result<Option<TensorId>> {
        // Required for qwen3. Elsewhere the tensor stays unused and so is refused.
        if hp.arch == Arch::Qwen3 { t.vector(&name(part), hp.head_dim).map(Some) } else { Ok(None) }
    };
    Ok(Layer {
        attn_norm: t.vector(&name("attn_norm.weight"), hp.hidden)?,
        qkv,
        q_norm: head_norm(t, "attn_q_norm.weight")?,
        k_norm: head_norm(t, "attn_k_norm.weight")?,
        o: t.linear(&name("attn_output"), hp.hidden, q)?,
        ffn_norm: t.vector(&name("ffn_norm.weight"), hp.hidden)?,
        gate_up: vec![t.linear(&name("ffn_gate"), hp.ffn, hp.hidden)?, t.linear(&name("ffn_up"), hp.ffn, hp.hidden)?],
        down: t.linear(&name("ffn_down"), hp.hidden, hp.ffn)?,
        attention: AttentionParams { scale: 1.0 / (hp.head_dim as f32).sqrt(), softcap: 0.0, window: hp.window },
    })
}

/// Tensors of old converters that repeat what the metadata say: the rotary embedding's angular steps of each layer.
fn is_precomputed(name: &str, layers: usize) -> bool {
    let Some((layer, part)) = name.strip_prefix("blk.").and_then(|n| n.split_once('.')) else { return false };
    let known = matches!(part, "attn_rot_embd" | "attn_rot_embd.weight" | "attn_rot_embd.inv_freq");
    known && layer.parse::<usize>().is_ok_and(|l| l < layers)
}
