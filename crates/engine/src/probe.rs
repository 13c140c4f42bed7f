//! What this machine can do: its host, its cards, and the links between them. Speeds are in bytes a second.

use serde::Serialize;

/// The host.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HostReport {
    /// The processor's name.
    pub processor: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Hardware threads that this process may use.
    pub hardware_threads: usize,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Kernel families that the processor can run, the best one last.
    pub kernels: Vec<String>,
    /// Instruction sets that matter here.
    pub features: Vec<String>,
    /// What all cores together read from memory.
    pub memory_read: f64,
}

/// The speed of copies of one size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChunkSpeed {
    /// Bytes of one copy.
    pub chunk: u64,
    /// Bytes a second.
    pub speed: f64,
}

/// One card.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CardReport {
    /// `cuda:0`.
    pub device: String,
    /// The card's name.
    pub card: String,
    /// Compute capability, such as `9.0`.
    pub capability: String,
    /// The newest CUDA version that the driver supports, such as `12.8`.
    pub driver: String,
    /// Bytes of the card.
    pub total_bytes: u64,
    /// Of those, free now.
    pub free_bytes: u64,
    /// Bytes of a granule, the unit in which its memory is mapped.
    pub granule: u64,
    /// True if file mappings can be registered, so that streaming needs no second copy in memory.
    pub read_only_registration: bool,
    /// From pinned memory to the card, by the size of a copy.
    pub host_to_device: Vec<ChunkSpeed>,
    /// From the card to pinned memory.
    pub device_to_host: f64,
    /// What kernels read from the card's memory; `None` without a kernel for the card.
    pub device_read: Option<f64>,
    /// What a copy within the card reads; it writes as many.
    pub device_copy_read: f64,
    /// What kernels read in place from pinned host memory; `None` without a kernel for the card.
    pub zero_copy_read: Option<f64>,
    /// What the memory's clock and width allow; `None` where the driver doesn't say.
    pub memory_peak: Option<f64>,
}

/// The machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MachineReport {
    /// The host.
    pub host: HostReport,
    /// Cards that can be used.
    pub cards: Vec<CardReport>,
    /// Why there are no cards, or not all that the driver sees; empty if nothing is wrong.
    pub problems: Vec<String>,
}

/// Measures the machine. Takes a second or two, and for that time 64 MiB of memory a core, and 256 MiB of pinned memory and
/// 512 MiB of each card. What can't be measured is said in `problems` and is no error.
pub fn probe() -> MachineReport {
    let host = headrace_ep_cpu::probe::probe();
    let (cards, problems) = cards();
    MachineReport {
        host: HostReport {
            processor: host.processor,
            cores: host.cores,
            hardware_threads: host.hardware_threads,
            memory_bytes: host.memory_bytes,
            kernels: host.kernels,
            features: host.features.into_iter().map(str::to_string).collect(),
            memory_read: host.memory_read,
        },
        cards,
        problems,
    }
}

#[cfg(feature = "cuda")]
fn cards() -> (Vec<CardReport>, Vec<String>) {
    let count = match headrace_ep_cuda::driver::Driver::load().and_then(|driver| driver.count()) {
        Ok(0) => return (Vec::new(), vec![headrace_ep_cuda::driver::DriverProblem::NoCard.to_string()]),
        Ok(count) => count,
        Err(problem) => return (Vec::new(), vec![problem.to_string()]),
    };
    let (mut cards, mut problems) = (Vec::new(), Vec::new());
    for ordinal in 0..count {
        match headrace_ep_cuda::probe::probe(ordinal) {
            Ok(p) => cards.push(CardReport {
                device: p.device,
                card: p.card,
                capability: format!("{}.{}", p.capability.0, p.capability.1),
                driver: format!("{}.{}", p.driver / 1000, p.driver % 1000 / 10),
                total_bytes: p.total_bytes,
                free_bytes: p.free_bytes,
                granule: p.granule,
                read_only_registration: p.read_only_registration,
                host_to_device: p
                    .host_to_device
                    .into_iter()
                    .map(|(chunk, speed)| ChunkSpeed { chunk, speed })
                    .collect(),
                device_to_host: p.device_to_host,
                device_read: p.device_read,
                device_copy_read: p.device_copy_read,
                zero_copy_read: p.zero_copy_read,
                memory_peak: p.memory_peak,
            }),
            Err(problem) => problems.push(format!("cuda:{ordinal}: {problem}")),
        }
    }
    (cards, problems)
}

#[cfg(not(feature = "cuda"))]
fn cards() -> (Vec<CardReport>, Vec<String>) {
    (Vec::new(), vec!["this build of Headrace has no CUDA provider".to_string()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_has_a_host_and_cards_or_a_reason_why_not() {
        let machine = probe();
        assert!(machine.host.memory_read > 0.0);
        assert_eq!(machine.cards.is_empty(), !machine.problems.is_empty(), "{machine:?}");
    }
}
