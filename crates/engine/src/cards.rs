//! Which cards are here, how much memory a device has, and what is assumed of a card that a plan is made for and that isn't here.

use headrace_ep_cpu::host_device::{HostDevice, HostOptions};
use headrace_provider::Provider;

use crate::error::Result;
use crate::mode::PlacementMode;
use crate::options::{DeviceChoice, EngineOptions};

/// Mapping unit of today's NVIDIA cards, in bytes.
const GRANULE: u64 = 2 << 20;

/// Size of a piece of weights on a card, in bytes, unless another one is asked for.
const PIECE_BYTES: u64 = 32 << 20;

/// Bytes assumed for context and kernels: more than today's drivers take.
const CONTEXT_BYTES: u64 = 768 << 20;

/// Bytes that captured graphs may take of a card.
const GRAPH_BYTES: u64 = 32 << 20;

/// Bytes of card `ordinal`, or why it can't be used. Makes no context.
#[cfg(feature = "cuda")]
pub(crate) fn card_memory(ordinal: usize) -> std::result::Result<u64, String> {
    let card = headrace_ep_cuda::driver::Driver::load().and_then(|driver| driver.usable_card(ordinal));
    card.map(|card| card.total_bytes).map_err(|problem| problem.to_string())
}

/// This build has no CUDA provider.
#[cfg(not(feature = "cuda"))]
pub(crate) fn card_memory(_ordinal: usize) -> std::result::Result<u64, String> {
    Err("this build of Headrace has no CUDA provider".to_string())
}

/// Bytes of memory of a device, of which a limit may be a share.
///
/// # Errors
/// Why there is no such figure, in words for a user.
pub fn total_memory(device: DeviceChoice) -> std::result::Result<u64, String> {
    match device {
        DeviceChoice::Cuda(ordinal) => {
            card_memory(ordinal).map_err(|reason| format!("device = \"cuda:{ordinal}\" can't be used: {reason}"))
        }
        DeviceChoice::Auto => card_memory(0).map_err(|reason| no_card(&reason)),
        DeviceChoice::HostDevice => Ok(headrace_ep_cpu::probe::memory_bytes()),
        DeviceChoice::Cpu => Err(NO_LIMIT_ON_CPU.to_string()),
    }
}

/// Why the CPU has no limit.
const NO_LIMIT_ON_CPU: &str = "the CPU reads weights from the file's mapping and has no memory of its own to limit; \
                               device = \"host-device\" computes on the CPU with limited memory";

/// What to say about a limit that the CPU was given; `auto` says why there is no card.
pub(crate) fn no_limit(auto: Option<&str>) -> String {
    auto.map_or_else(|| NO_LIMIT_ON_CPU.to_string(), no_card)
}

fn no_card(reason: &str) -> String {
    format!("device = \"auto\" found no card ({reason}), and {NO_LIMIT_ON_CPU}")
}

/// A card that a plan is made for and that isn't here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AbsentCard {
    /// What is assumed and why, a sentence for a user.
    pub(crate) note: String,
}

impl AbsentCard {
    /// The card that `options` ask a plan for, if it isn't here. `auto` asks for one if something is limited or placed, which the
    /// CPU can't do.
    pub(crate) fn wanted(options: &EngineOptions) -> Option<AbsentCard> {
        let about_memory = options.vram_limit.is_some() || options.placement != PlacementMode::Auto;
        let ordinal = match options.device {
            DeviceChoice::Cuda(ordinal) => ordinal,
            DeviceChoice::Auto if about_memory => 0,
            _ => return None,
        };
        let reason = card_memory(ordinal).err()?;
        let note = format!(
            "planned for a card that isn't here ({reason}): {} MiB for context and kernels and granules of {} MiB are assumed",
            CONTEXT_BYTES >> 20,
            GRANULE >> 20
        );
        Some(AbsentCard { note })
    }

    /// A device that stands in for the card in a plan, and nowhere else: its sizes are the card's, as far as they are known.
    pub(crate) fn stand_in(&self, max_context: usize) -> Result<Box<dyn Provider>> {
        let options = HostOptions {
            threads: Some(1),
            granule: GRANULE,
            shared_bytes: CONTEXT_BYTES,
            positions: Some(max_context),
            ..HostOptions::default()
        };
        Ok(Box::new(HostDevice::new(options)?))
    }

    /// `options` as a card would have them.
    pub(crate) fn options(&self, options: &EngineOptions) -> EngineOptions {
        EngineOptions { piece_bytes: options.piece_bytes.or(Some(PIECE_BYTES)), ..options.clone() }
    }

    /// Bytes that captured graphs may take.
    pub(crate) fn graph_bytes(&self) -> u64 {
        GRAPH_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "cuda")]
    #[test]
    fn what_is_assumed_of_a_card_is_what_the_provider_uses() {
        assert_eq!(PIECE_BYTES, headrace_ep_cuda::provider::PIECE_BYTES);
        assert_eq!(GRAPH_BYTES, headrace_ep_cuda::provider::GRAPH_BYTES);
        assert_eq!(CONTEXT_BYTES, headrace_ep_cuda::overhead::ASSUMED_BYTES);
    }

    #[test]
    fn every_device_has_a_total_or_a_reason() {
        assert!(total_memory(DeviceChoice::HostDevice).unwrap() > 1 << 20);
        assert!(total_memory(DeviceChoice::Cpu).unwrap_err().contains("host-device"));
        let missing = total_memory(DeviceChoice::Cuda(4096)).unwrap_err();
        assert!(missing.contains("cuda:4096") && missing.len() > 40, "{missing}");
        match (total_memory(DeviceChoice::Auto), card_memory(0)) {
            (Ok(total), Ok(card)) => assert_eq!(total, card),
            (Err(auto), Err(reason)) => assert!(auto.contains(&reason) && auto.contains("host-device"), "{auto}"),
            other => panic!("{other:?}"),
        }
    }
}
