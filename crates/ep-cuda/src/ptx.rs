//! The device code that the build compiled, by compute capability.

/// One file of kernels as PTX.
#[derive(Clone, Copy, Debug)]
pub struct Module {
    /// File name without its ending.
    pub name: &'static str,
    /// PTX text with a terminating zero.
    pub ptx: &'static [u8],
}

/// All kernels for devices of one compute capability and up.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Ten times the major plus the minor version: 75, 80, 90.
    pub capability: u32,
    /// Modules. Those without kernels for the target are empty of entries, not missing.
    pub modules: &'static [Module],
}

/// Targets in increasing order; empty if the crate was built without the feature `cuda`.
pub static TARGETS: &[Target] = include!(concat!(env!("OUT_DIR"), "/ptx_table.rs"));

/// The newest target that a device of this compute capability runs; `None` if the device is too old.
pub fn target_for(major: u32, minor: u32) -> Option<&'static Target> {
    TARGETS.iter().rev().find(|t| t.capability <= major * 10 + minor)
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    #[test]
    fn devices_get_the_newest_code_they_run() {
        // Builds may leave targets out.
        let built = |target| TARGETS.iter().map(|t| t.capability).filter(|&t| t <= target).max();
        for (device, target) in
            [((7, 0), None), ((7, 5), Some(75)), ((8, 9), Some(80)), ((9, 0), Some(90)), ((12, 0), Some(90))]
        {
            assert_eq!(target_for(device.0, device.1).map(|t| t.capability), target.and_then(built), "{device:?}");
        }
        assert!(!TARGETS.is_empty());
    }

    #[test]
    fn every_module_is_text_that_ends_in_zero() {
        for module in TARGETS.iter().flat_map(|t| t.modules) {
            assert_eq!(module.ptx.last(), Some(&0), "{}", module.name);
            assert!(module.ptx.starts_with(b"//"), "{}", module.name);
        }
    }
}
