//! The process's physical use of a card, by NVML: a second witness beside the ledger. Loaded at run time.

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;

/// NVML, if it is there.
#[derive(Debug)]
pub struct Monitor {
    nvml: Nvml,
    bus_id: String,
}

impl Monitor {
    /// Loads NVML for the card at a bus address. Without it there is one log line, and figures are absent.
    pub fn open(bus_id: &str) -> Option<Monitor> {
        match Nvml::init() {
            Ok(nvml) => Some(Monitor { nvml, bus_id: bus_id.to_string() }),
            Err(error) => {
                log::warn!("NVML can't be loaded ({error}): no physical memory figures");
                None
            }
        }
    }

    /// Bytes of the card that this process uses; `None` where NVML doesn't say, as in containers that hide process ids.
    pub fn process_bytes(&self) -> Option<u64> {
        let device = self.nvml.device_by_pci_bus_id(self.bus_id.as_str()).ok()?;
        let id = std::process::id();
        let process = device.running_compute_processes().ok()?.into_iter().find(|p| p.pid == id)?;
        match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        }
    }

    /// Bytes of the card that all processes and the driver use together.
    pub fn card_bytes(&self) -> Option<u64> {
        let device = self.nvml.device_by_pci_bus_id(self.bus_id.as_str()).ok()?;
        Some(device.memory_info().ok()?.used)
    }
}
