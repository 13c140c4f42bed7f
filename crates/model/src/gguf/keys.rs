//! Which `{arch}.*` metadata keys are read, which are harmless, and which change the arithmetic and are refused.

use crate::error::Result;
use crate::gguf::fault;
use crate::gguf::header::GgufFile;
use crate::gguf::value::Value;

/// Keys that are read elsewhere, or say nothing about the arithmetic.
const KNOWN: &[&str] = &[
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
];

/// Keys that change the arithmetic, or ask for a part that is not there, and the numbers with which they don't.
const REFUSED: &[(&str, &[f64])] = &[
    ("activation_sparsity_scale", &[]),
    ("attention.causal", &[1.0]),
    ("attention.clamp_kqv", &[0.0]),
    ("attention.key_length_mla", &[0.0]),
    ("attention.key_length_swa", &[0.0]),
    ("attention.kv_lora_rank", &[0.0]),
    ("attention.max_alibi_bias", &[0.0]),
    ("attention.output_scale", &[0.0, 1.0]),
    ("attention.q_lora_rank", &[0.0]),
    ("attention.relative_buckets_count", &[0.0]),
    ("attention.scale", &[0.0]),
    ("attention.shared_kv_layers", &[0.0]),
    ("attention.temperature_length", &[0.0]),
    ("attention.temperature_scale", &[0.0]),
    ("attention.value_length_mla", &[0.0]),
    ("attention.value_length_swa", &[0.0]),
    ("attn_logit_softcapping", &[0.0]),
    ("embedding_length_out", &[0.0]),
    ("embedding_length_per_layer_input", &[0.0]),
    ("embedding_scale", &[0.0, 1.0]),
    ("expert_count", &[0.0]),
    ("expert_shared_count", &[0.0]),
    ("expert_used_count", &[0.0]),
    ("final_logit_softcapping", &[0.0]),
    ("full_attention_interval", &[0.0, 1.0]),
    ("interleave_moe_layer_step", &[0.0]),
    ("leading_dense_block_count", &[0.0]),
    ("logit_scale", &[0.0, 1.0]),
    ("n_deepstack_layers", &[0.0]),
    ("nextn_predict_layers", &[0.0]),
    ("pooling_type", &[0.0]),
    ("rescale_every_n_layers", &[0.0]),
    ("residual_scale", &[0.0, 1.0]),
    ("rope.dimension_count_swa", &[0.0]),
    ("rope.dimension_sections", &[0.0]),
    ("rope.freq_base_swa", &[0.0]),
    ("rope.scaling.alpha", &[0.0, 1.0]),
    ("rope.scaling.attn_factor", &[0.0, 1.0]),
    ("rope.scaling.yarn_attn_factor", &[0.0, 1.0]),
    ("rope.scaling.yarn_ext_factor", &[0.0]),
    ("rope.scaling.yarn_log_multiplier", &[0.0]),
    ("swiglu_clamp_exp", &[0.0]),
    ("swiglu_clamp_shexp", &[0.0]),
    ("swin_norm", &[0.0]),
    ("use_parallel_residual", &[0.0]),
];

/// Names of activations that are the one the layer has.
const SILU: &[&str] = &["silu", "swish", "swiglu"];

/// Refuses keys that change the arithmetic, and logs those nobody knows.
pub(super) fn check(file: &GgufFile, arch: &str) -> Result<()> {
    let prefix = format!("{arch}.");
    for (key, entry) in &file.metadata {
        let Some(name) = key.strip_prefix(&prefix) else { continue };
        if let Some((_, neutral)) = REFUSED.iter().find(|(n, _)| *n == name) {
            if !is_neutral(file, key, &entry.value, neutral)? {
                return Err(file.key_unsupported(key, refusal(file, key, name, &entry.value)));
            }
        } else if name == "hidden_act" {
            let act = file.string(key)?.unwrap_or_default();
            if !SILU.contains(&act) {
                return Err(file.key_unsupported(key, format!("activation `{}`; only silu is done", fault::shown(act))));
            }
        } else if !KNOWN.contains(&name) {
            log::warn!("{}: metadata key {} is not known and not used", file.file.path.display(), fault::shown(key));
        }
    }
    Ok(())
}

/// True if the value, or every element of an array, is one of the `neutral` numbers.
fn is_neutral(file: &GgufFile, key: &str, value: &Value, neutral: &[f64]) -> Result<bool> {
    let plain = |v: &Value| v.number().is_some_and(|x| neutral.contains(&x));
    match value {
        Value::Array(_) => {
            let Some(view) = file.array(key)? else { return Ok(true) };
            Ok(view.elem().bytes().is_some() && view.scalars().all(|v| plain(&v)))
        }
        other => Ok(plain(other)),
    }
}

fn refusal(file: &GgufFile, key: &str, name: &str, value: &Value) -> String {
    let shown = match (value.number(), file.string(key)) {
        (Some(x), _) => format!("{x}"),
        (None, Ok(Some(text))) => format!("`{}`", fault::shown(text)),
        _ => value.type_name().to_owned(),
    };
    let why = match name {
        n if n.contains("expert") || n.contains("moe") => "mixture-of-experts models are not supported yet",
        "pooling_type" => "an embedding model, which generates no text",
        _ => "this changes the arithmetic in a way that is not supported",
    };
    format!("is {shown}: {why}")
}
