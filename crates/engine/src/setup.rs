//! From options to a device: checks, KV geometry, sizes.

use headrace_ep_cpu::host_device::{HostDevice, HostDeviceOptions};
use headrace_ep_cpu::{CpuOptions, CpuProvider};
use headrace_kv::KvGeometry;
use headrace_model::ModelSpec;
use headrace_provider::Provider;

use crate::error::{EngineError, Result};
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

/// What the model and the options decide together.
pub(crate) struct Setup {
    /// KV pages.
    pub(crate) geometry: KvGeometry,
    /// Most positions of a sequence.
    pub(crate) max_context: usize,
    workspace: u64,
}

/// The limit of a host device that was given none: more than any machine has.
const UNLIMITED: u64 = 1 << 46;

impl Setup {
    /// Checks the options against the model.
    pub(crate) fn new(model: &ModelSpec, options: &EngineOptions) -> Result<Setup> {
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
        }
    }

    /// The device that the options ask for.
    ///
    /// # Errors
    /// [`EngineError::Argument`] for a limit where there is nothing to limit; the device's.
    pub(crate) fn device(&self, options: &EngineOptions) -> Result<Device> {
        let threads = options.threads;
        match (options.device, options.vram_limit) {
            (DeviceChoice::Auto | DeviceChoice::Cpu, None) => {
                Ok(Device::InPlace(Box::new(CpuProvider::new(CpuOptions { threads, level: None })?)))
            }
            (DeviceChoice::Auto | DeviceChoice::Cpu, Some(limit)) => Err(EngineError::argument(
                "vram_limit",
                limit,
                "the CPU reads weights from the file's mapping and has no memory of its own to limit",
            )),
            (DeviceChoice::HostDevice, limit) => {
                let limit = limit.unwrap_or(UNLIMITED);
                let options = HostDeviceOptions { threads, capacity: limit, ..HostDeviceOptions::default() };
                Ok(Device::Paged(Box::new(HostDevice::new(options)?), limit))
            }
        }
    }
}
