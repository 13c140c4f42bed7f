//! The device code that the build compiled, by compute capability.

/// One file of kernels as PTX.
#[derive(Clone, Copy, Debug)]
pub struct Module {
    /// File name without its ending.
    pub name: &'static str,
    /// PTX text with a terminating zero.
    pub ptx: &'static [u8],
}

impl Module {
    /// The kernel `name` alone, as text with a terminating zero: what the module declares, and that entry. The driver
    /// compiles a module's text whole, so a kernel that nobody launches would cost time at the first load. `None` if there is
    /// no such entry.
    pub fn entry(&self, name: &str) -> Option<Vec<u8>> {
        let text = std::str::from_utf8(self.ptx.strip_suffix(&[0])?).ok()?;
        let (mut declared, mut wanted) = (String::new(), None);
        let mut rest = text;
        while let Some(start) = rest.find(ENTRY) {
            declared.push_str(&rest[..start]);
            let end = start + entry_end(&rest[start..])?;
            let after = rest[start + ENTRY.len()..].strip_prefix(name);
            if after.is_some_and(|after| after.starts_with('(')) {
                wanted = Some(&rest[start..end]);
            }
            rest = &rest[end..];
        }
        declared.push_str(rest);
        Some([declared.as_bytes(), wanted?.as_bytes(), b"\n\0"].concat())
    }

    /// Names of its kernels.
    pub fn entries(&self) -> impl Iterator<Item = &str> {
        let text = std::str::from_utf8(self.ptx).unwrap_or_default();
        text.split(ENTRY).skip(1).filter_map(|entry| entry.split('(').next())
    }
}

/// How an entry begins.
const ENTRY: &str = ".visible .entry ";

/// Where the entry ends that `text` begins with: behind the brace that closes its body.
fn entry_end(text: &str) -> Option<usize> {
    let mut depth = 0usize;
    for (at, brace) in text.match_indices(['{', '}']) {
        depth = if brace == "{" { depth + 1 } else { depth.checked_sub(1)? };
        if depth == 0 {
            return Some(at + 1);
        }
    }
    None
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

    #[test]
    fn every_kernel_stands_alone_with_what_its_module_declares() {
        let mut count = 0;
        for module in TARGETS.iter().flat_map(|t| t.modules) {
            let whole = String::from_utf8_lossy(module.ptx);
            let shared = whole.matches(".extern .shared").count();
            for name in module.entries() {
                let alone = module.entry(name).unwrap_or_else(|| panic!("{} {name}", module.name));
                assert_eq!(alone.last(), Some(&0));
                let alone = String::from_utf8_lossy(&alone);
                assert_eq!(alone.matches(".entry").count(), 1, "{} {name}", module.name);
                assert!(alone.contains(&format!("{ENTRY}{name}(")) && alone.contains(".target sm_"));
                assert_eq!(alone.matches(".extern .shared").count(), shared);
                assert_eq!(alone.matches('{').count(), alone.matches('}').count());
                count += 1;
            }
            assert!(module.entry("no_such_kernel").is_none() && module.entry("").is_none());
        }
        assert!(count > 100, "{count} kernels");
    }
}
