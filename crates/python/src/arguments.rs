//! Python's words for the engine's options.

use headrace_engine::{DeviceChoice, EngineOptions, GenerationOptions, PlacementMode, PolicyKind};
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

/// Keyword arguments of `Engine.load` and `plan`, as they come: a dict with exactly these keys.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct LoadArguments {
    device: String,
    vram_limit: Option<u64>,
    host_limit: Option<u64>,
    placement: String,
    host_mapped_budget: Option<u64>,
    headroom: Option<u64>,
    max_context: Option<usize>,
    max_batch: usize,
    prefill_chunk: usize,
    steps_in_flight: Option<usize>,
    activations: String,
    kv_dtype: String,
    kv_layout: String,
    threads: Option<usize>,
    piece_bytes: Option<u64>,
    ring_slots: u32,
    policy: Option<String>,
    pinned: Vec<String>,
    pin_threshold: u64,
    policy_budget: Option<u64>,
}

/// The engine's options.
pub fn engine_options(arguments: LoadArguments) -> PyResult<EngineOptions> {
    let LoadArguments { max_context, max_batch, prefill_chunk, steps_in_flight, threads, .. } = arguments;
    let LoadArguments { vram_limit, piece_bytes, ring_slots, .. } = arguments;
    let LoadArguments { pin_threshold, policy_budget, .. } = arguments;
    let LoadArguments { host_mapped_budget, headroom, host_limit, .. } = arguments;
    let LoadArguments { placement, .. } = &arguments;
    let LoadArguments { device, activations, kv_dtype, kv_layout, policy, pinned, .. } = &arguments;
    Ok(EngineOptions {
        vram_limit,
        host_limit,
        placement: choose("placement", placement, &PlacementMode::ALL.map(|mode| (mode.name(), mode)))?,
        host_mapped_budget,
        headroom,
        piece_bytes,
        ring_slots,
        device: device_choice(device)?,
        max_context,
        max_batch,
        prefill_chunk,
        steps_in_flight,
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
        policy: policy.as_deref().map(policy_kind).transpose()?,
        pinned: pinned.clone(),
        pin_threshold,
        policy_budget,
    })
}

/// The device that a name stands for; `cuda:N` is card `N`.
pub fn device_choice(name: &str) -> PyResult<DeviceChoice> {
    if let Some(ordinal) = name.strip_prefix("cuda:").and_then(|n| n.parse().ok()) {
        return Ok(DeviceChoice::Cuda(ordinal));
    }
    let choices = [
        ("auto", DeviceChoice::Auto),
        ("cpu", DeviceChoice::Cpu),
        ("cuda", DeviceChoice::Cuda(0)),
        ("host-device", DeviceChoice::HostDevice),
    ];
    choose("device", name, &choices)
}

/// The residency policy of that name.
pub fn policy_kind(name: &str) -> PyResult<PolicyKind> {
    choose("policy", name, &PolicyKind::ALL.map(|kind| (kind.name(), kind)))
}

/// Keyword arguments of a generation, as they come: a dict with exactly these keys.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct GenerateArguments {
    max_new_tokens: Option<usize>,
    temperature: f32,
    top_k: usize,
    top_p: f32,
    seed: u64,
    stop_tokens: Vec<u32>,
    speculation: usize,
    keep_logits: bool,
}

impl From<GenerateArguments> for GenerationOptions {
    fn from(arguments: GenerateArguments) -> GenerationOptions {
        let GenerateArguments { max_new_tokens, temperature, top_k, top_p, seed, .. } = arguments;
        let GenerateArguments { stop_tokens, speculation, keep_logits, .. } = arguments;
        GenerationOptions { max_new_tokens, temperature, top_k, top_p, seed, stop_tokens, speculation, keep_logits }
    }
}
