//! From options to a device: checks, KV geometry, sizes.

use std::sync::Arc;

use headrace_ep_cpu::host_device::{HostDevice, HostOptions};
use headrace_ep_cpu::{CpuOptions, CpuProvider};
use headrace_kv::KvGeometry;
use headrace_model::ModelSpec;
use headrace_provider::{DeviceError, Provider};

use crate::auto::Link;
#[cfg(feature = "cuda")]
use crate::books::Books;
use crate::cards::no_limit;
use crate::error::{EngineError, Result};
use crate::mode::PlacementMode;
use crate::options::{DeviceChoice, EngineOptions};
use crate::plan::Sizes;
use crate::program;

/// A device as the options ask for it, nothing attached yet.
pub(crate) enum Device {
    /// Reads weights in place.
    InPlace(Box<dyn Provider>),
    /// Has memory of its own, of which so many bytes may be used.
    Paged(Box<dyn Provider>, u64),
}

impl Device {
    /// The model with its matrices in the formats that the device wants.
    pub(crate) fn arranged(&self, model: &Arc<ModelSpec>) -> Arc<ModelSpec> {
        match self {
            Device::InPlace(provider) | Device::Paged(provider, _) => model.arranged(|f| provider.wanted_format(f)),
        }
    }
}

/// A device, and what was asked for if it is something else.
pub(crate) struct Chosen {
    pub(crate) device: Device,
    pub(crate) asked_for: String,
}

/// What the model and the options decide together.
pub(crate) struct Setup {
    /// KV pages.
    pub(crate) geometry: KvGeometry,
    /// Most positions of a sequence.
    pub(crate) max_context: usize,
    workspace: u64,
}

/// The limit of a host device that was given none, and of any device that is not managed: more than any machine has.
pub(crate) const UNLIMITED: u64 = 1 << 46;

impl Setup {
    /// Checks the options against the model.
    pub(crate) fn new(model: &ModelSpec, options: &EngineOptions) -> Result<Setup> {
        crate::environment::check()?;
        options.check()?;
        let declared = model.config.max_context;
        let max_context = options.max_context.unwrap_or(declared);
        if max_context > declared {
            let what = format!("the model declares {declared} positions and was not made for more");
            return Err(EngineError::argument("max_context", max_context, what));
        }
        let geometry = KvGeometry {
            layers: model.layers.len(),
            kv_heads: model.config.kv_heads,
            head_dim: model.config.head_dim,
            dtype: options.kv_dtype,
            layout: options.kv_layout,
            page_tokens: KvGeometry::DEFAULT_PAGE_TOKENS,
        };
        let workspace = program::in_place(model, options).workspace_bytes(&model.config);
        Ok(Setup { geometry, max_context, workspace })
    }

    /// The sizes that a limit has to hold.
    pub(crate) fn sizes(&self, options: &EngineOptions, limit: u64) -> Sizes {
        Sizes {
            limit,
            workspace: self.workspace,
            geometry: self.geometry,
            max_context: self.max_context,
            max_batch: options.max_batch,
            slots: options.ring_slots,
            mode: options.placement,
            mapped_budget: options.host_mapped_bytes(),
            link: Link::Unmeasured,
            headroom: options.headroom_bytes(),
        }
    }

    /// The device that the options ask for.
    ///
    /// # Errors
    /// [`EngineError::Argument`] for a limit where there is nothing to limit; the device's.
    pub(crate) fn device(&self, options: &EngineOptions) -> Result<Chosen> {
        let as_asked = |device| Ok(Chosen { device, asked_for: String::new() });
        match options.device {
            DeviceChoice::Cpu => as_asked(cpu(options, None)?),
            DeviceChoice::HostDevice => as_asked(host_device(options, self.max_context)?),
            DeviceChoice::Cuda(ordinal) => match cuda(ordinal, options, self.max_context) {
                Ok(device) => as_asked(device),
                Err(what) => Err(DeviceError::Failed { device: format!("cuda:{ordinal}"), what }.into()),
            },
            DeviceChoice::Auto => match cuda(0, options, self.max_context) {
                Ok(device) => as_asked(device),
                Err(reason) => {
                    log::info!("device auto: computing on the CPU, because of CUDA: {reason}");
                    Ok(Chosen { device: cpu(options, Some(&reason))?, asked_for: format!("auto; no CUDA: {reason}") })
                }
            },
        }
    }
}

/// The CPU; `auto` says why there is no card, if that was looked for.
fn cpu(options: &EngineOptions, auto: Option<&str>) -> Result<Device> {
    if options.placement != PlacementMode::Auto {
        let mut what =
            "the CPU reads weights from the file's mapping, and places nothing: leave it at auto".to_string();
        if let Some(reason) = auto {
            what = format!("device = \"auto\" found no card ({reason}), and {what}, or give device = \"host-device\"");
        }
        return Err(EngineError::argument("placement", options.placement.name(), what));
    }
    match options.vram_limit {
        None => Ok(Device::InPlace(Box::new(CpuProvider::new(CpuOptions { threads: options.threads, level: None })?))),
        Some(limit) => Err(EngineError::argument("vram_limit", limit, no_limit(auto))),
    }
}

fn host_device(options: &EngineOptions, max_context: usize) -> Result<Device> {
    // Each engine has a host device of its own, as engines on different cards have: memory and limit are that engine's alone.
    let limit = options.vram_limit.unwrap_or(UNLIMITED);
    let host = HostOptions { threads: options.threads, positions: Some(max_context), ..HostOptions::default() };
    Ok(Device::Paged(Box::new(HostDevice::new(host)?), limit))
}

/// Card `ordinal`; the error says what the machine lacks.
#[cfg(feature = "cuda")]
fn cuda(ordinal: usize, options: &EngineOptions, max_context: usize) -> std::result::Result<Device, String> {
    use headrace_ep_cuda::CudaProvider;

    let opened = match options.placement {
        PlacementMode::Unmanaged => CudaProvider::open_plain(ordinal),
        _ => CudaProvider::open(ordinal),
    };
    let mut provider = opened.map_err(|e| e.to_string())?;
    provider.limit_positions(max_context);
    let (free, _) = provider.context().memory_info().map_err(|e| e.to_string())?;
    let limit = match options.placement {
        PlacementMode::Unmanaged => UNLIMITED,
        // Without a limit of its own: the one that is in force for the process, else all that is free. What the context took
        // already is part of it.
        _ => options.vram_limit.unwrap_or_else(|| {
            let in_force = provider.memory_key().and_then(|key| Books::limit_of(&key));
            in_force.unwrap_or(free + provider.fixed_bytes() + provider.shared_bytes())
        }),
    };
    Ok(Device::Paged(Box::new(provider), limit))
}

/// This build has no CUDA provider.
#[cfg(not(feature = "cuda"))]
fn cuda(_ordinal: usize, _options: &EngineOptions, _max_context: usize) -> std::result::Result<Device, String> {
    Err("this build of Headrace has no CUDA provider".to_string())
}
