//! Python's words for the engine's options.

use headrace_engine::{DeviceChoice, EngineOptions, GenerationOptions};
use headrace_kv::KvLayout;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::elementwise::KvDtype;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The choice that `value` names. An unknown name is an error that lists the known ones.
fn choose<T: Copy>(argument: &str, value: &str, choices: &[(&str, T)]) -> PyResult<T> {
    choices.iter().find(|(name, _)| *name == value).map(|(_, choice)| *choice).ok_or_else(|| {
        let names: Vec<String> = choices.iter().map(|(name, _)| format!("{name:?}")).collect();
        PyValueError::new_err(format!("{argument} = {value:?}: must be one of {}", names.join(", ")))
    })
}

/// Keyword arguments of `Engine.load`, as they come.
#[allow(clippy::too_many_arguments)]
pub fn engine_options(
    device: &str,
    max_context: Option<usize>,
    max_batch: usize,
    prefill_chunk: usize,
    activations: &str,
    kv_dtype: &str,
    kv_layout: &str,
    threads: Option<usize>,
) -> PyResult<EngineOptions> {
    Ok(EngineOptions {
        device: choose("device", device, &[("auto", DeviceChoice::Auto), ("cpu", DeviceChoice::Cpu)])?,
        max_context,
        max_batch,
        prefill_chunk,
        activations: choose(
            "activations",
            activations,
            &[("int16", ActivationWidth::Int16), ("int8", ActivationWidth::Int8)],
        )?,
        kv_dtype: choose("kv_dtype", kv_dtype, &[("float16", KvDtype::F16), ("float32", KvDtype::F32)])?,
        kv_layout: choose(
            "kv_layout",
            kv_layout,
            &[("head-major", KvLayout::HeadMajor), ("seq-major", KvLayout::SeqMajor)],
        )?,
        threads,
    })
}

/// Keyword arguments of a generation, as they come.
#[allow(clippy::too_many_arguments)]
pub fn generation_options(
    max_new_tokens: Option<usize>,
    temperature: f32,
    top_k: usize,
    top_p: f32,
    seed: u64,
    stop_tokens: Vec<u32>,
) -> GenerationOptions {
    GenerationOptions { max_new_tokens, temperature, top_k, top_p, seed, stop_tokens }
}
