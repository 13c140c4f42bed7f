//! Where cold weights may be read from: the placement modes, and the defaults that depend on the platform.

use serde::Serialize;

/// How weights are placed. No mode changes a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PlacementMode {
    /// Everything resident if it fits beside all KV; else streamed, or read in place where that is measured to be faster. The
    /// plan says which, and why.
    #[default]
    Auto,
    /// Everything resident, for good; a limit that can't hold it is refused.
    Resident,
    /// A fixed resident set, and the rest copied through the staging ring each step.
    Stream,
    /// Cold weights are read in place by the kernels, over the link, up to the host-mapped budget; no ring.
    ZeroCopy,
    /// Cold weights up to the host-mapped budget are read in place, the rest is streamed.
    Hybrid,
    /// Everything resident, KV for all sequences from the beginning, in plain allocations that are counted and not limited: what
    /// a run without Headrace's governor does.
    Unmanaged,
}

impl PlacementMode {
    /// Every mode.
    pub const ALL: [PlacementMode; 6] = [
        PlacementMode::Auto,
        PlacementMode::Resident,
        PlacementMode::Stream,
        PlacementMode::ZeroCopy,
        PlacementMode::Hybrid,
        PlacementMode::Unmanaged,
    ];

    /// Name in options and stats.
    pub const fn name(self) -> &'static str {
        match self {
            PlacementMode::Auto => "auto",
            PlacementMode::Resident => "resident",
            PlacementMode::Stream => "stream",
            PlacementMode::ZeroCopy => "zero-copy",
            PlacementMode::Hybrid => "hybrid",
            PlacementMode::Unmanaged => "unmanaged",
        }
    }

    /// True if kernels may read cold weights in place.
    pub const fn reads_in_place(self) -> bool {
        matches!(self, PlacementMode::ZeroCopy | PlacementMode::Hybrid)
    }

    /// True if kernels may come to read cold weights in place: `auto` chooses.
    pub const fn may_read_in_place(self) -> bool {
        matches!(self, PlacementMode::Auto) || self.reads_in_place()
    }

    /// True if cold weights may go through the staging ring.
    pub const fn streams(self) -> bool {
        matches!(self, PlacementMode::Auto | PlacementMode::Stream | PlacementMode::Hybrid)
    }
}

/// Bytes that a step may read in place if nobody says otherwise, on the platform `os`: a name as
/// [`std::env::consts::OS`] has it, or `wsl`.
///
/// Where Windows drives the card, reads in place have returned stale bytes, without an error, from about 0.44 GB a step
/// on; under Linux 6.8 GB were right. An unknown platform has shown nothing, so there nothing is read in place.
pub fn default_host_mapped_budget(os: &str) -> u64 {
    match os {
        "windows" | "wsl" => 256 << 20,
        "linux" | "android" | "macos" | "ios" | "freebsd" | "netbsd" | "openbsd" | "dragonfly" | "solaris"
        | "illumos" => 2 << 30,
        _ => 0,
    }
}

/// Bytes of a card that stay free below the limit if nobody says otherwise, on the platform `os`. Where Windows drives the
/// card the desktop draws from the same memory; elsewhere the limit itself is what is left to others.
pub fn default_headroom(os: &str) -> u64 {
    match os {
        "windows" | "wsl" => 512 << 20,
        _ => 0,
    }
}

/// The platform this process runs on: [`std::env::consts::OS`], or `wsl` where a Linux kernel reaches the card through
/// Windows.
pub fn platform() -> &'static str {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    if release.to_ascii_lowercase().contains("microsoft") { "wsl" } else { std::env::consts::OS }
}

/// What a mode came to, and why. Part of the plan and of the stats.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PlacementChoice {
    /// The mode in force: never `auto`.
    pub mode: String,
    /// The mode that was asked for.
    pub asked_for: String,
    /// Why this mode, with the figures that decided: in `auto` what this machine's link was measured at, both ways. In stats the
    /// speed of copies stands here for a mode that was asked for and streams, too.
    pub reason: String,
    /// Bytes that a step may read in place; 0 in modes that read nothing in place.
    pub host_mapped_budget: u64,
    /// Bytes that stay free below the limit.
    pub headroom: u64,
}

impl PlacementChoice {
    /// With what the link was measured at, in bytes a second, behind the reason of a mode that streams and was asked
    /// for; `None` where nothing was measured.
    pub(crate) fn with_link(mut self, measured: Option<f64>) -> PlacementChoice {
        let asked_for = |mode: &PlacementMode| mode.name() == self.mode && self.mode == self.asked_for;
        let streams = PlacementMode::ALL.iter().any(|mode| mode.streams() && asked_for(mode));
        if let Some(speed) = measured.filter(|_| streams) {
            self.reason += &format!("; this link was measured at {:.1} GB/s", speed / 1e9);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_mapped_budget_depends_on_the_platform_alone() {
        assert_eq!(default_host_mapped_budget("windows"), 268_435_456);
        assert_eq!(default_host_mapped_budget("wsl"), 268_435_456);
        for unix in ["linux", "macos", "freebsd"] {
            assert_eq!(default_host_mapped_budget(unix), 2_147_483_648, "{unix}");
        }
        for unknown in ["", "plan9", "Linux", "hermit"] {
            assert_eq!(default_host_mapped_budget(unknown), 0, "{unknown}");
        }
        assert_eq!((default_headroom("linux"), default_headroom("windows")), (0, 536_870_912));
        assert!(["linux", "wsl", "macos", "windows"].contains(&platform()));
    }

    #[test]
    fn names_are_distinct_and_only_two_modes_read_in_place() {
        let mut names = PlacementMode::ALL.map(PlacementMode::name).to_vec();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), PlacementMode::ALL.len());
        let in_place = PlacementMode::ALL.into_iter().filter(|m| m.reads_in_place());
        assert_eq!(in_place.collect::<Vec<_>>(), [PlacementMode::ZeroCopy, PlacementMode::Hybrid]);
    }
}
