//! The memory that a control group leaves this process: the smallest limit from its own group up to the root, of versions 1 and 2.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// A mounted hierarchy of control groups.
struct Mount {
    /// The group that is mounted, as `/proc/self/cgroup` would name it.
    root: PathBuf,
    /// Where.
    at: PathBuf,
    /// True for version 2.
    unified: bool,
}

/// A field of `mountinfo`, in which blanks are written in octal.
fn path(field: &str) -> PathBuf {
    PathBuf::from(field.replace("\\040", " "))
}

/// The hierarchies of a line of `/proc/self/mountinfo` that count memory.
fn mount(line: &str) -> Option<Mount> {
    let (before, after) = line.split_once(" - ")?;
    let mut after = after.split(' ');
    let (kind, options) = (after.next()?, after.nth(1).unwrap_or_default());
    let unified = kind == "cgroup2";
    if !unified && (kind != "cgroup" || !options.split(',').any(|option| option == "memory")) {
        return None;
    }
    let mut fields = before.split(' ').skip(3);
    Some(Mount { root: path(fields.next()?), at: path(fields.next()?), unified })
}

/// The group of this process in `/proc/self/cgroup`: of version 2, or of version 1's hierarchy for memory.
fn group(text: &str, unified: bool) -> Option<&str> {
    text.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let found = match unified {
            true => number == "0" && controllers.is_empty(),
            false => controllers.split(',').any(|controller| controller == "memory"),
        };
        found.then_some(path)
    })
}

/// The path of `file` under `root`, which stands for `/`.
fn under(root: &Path, file: &Path) -> PathBuf {
    root.join(file.strip_prefix("/").unwrap_or(file))
}

/// The smallest limit of a hierarchy, in bytes.
fn smallest(root: &Path, mount: &Mount, groups: &str) -> Option<u64> {
    let group = Path::new(group(groups, mount.unified)?);
    // A group outside of what is mounted, as a container may see it: what is mounted counts.
    let below = group.strip_prefix(&mount.root).unwrap_or(Path::new(""));
    let file = if mount.unified { "memory.max" } else { "memory.limit_in_bytes" };
    // "max" is no number, and no limit.
    let limit = |directory: &Path| read_to_string(under(root, &directory.join(file))).ok()?.trim().parse::<u64>().ok();
    below.ancestors().filter_map(|part| limit(&mount.at.join(part))).min()
}

/// Bytes that this process and what shares its control groups may take; `None` where none of them is limited. `root` stands for
/// `/`: for tests, a folder of recorded files.
pub fn memory_limit(root: &Path) -> Option<u64> {
    let groups = read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mounts = read_to_string(root.join("proc/self/mountinfo")).ok()?;
    mounts.lines().filter_map(mount).filter_map(|mount| smallest(root, &mount, &groups)).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    const V2: &str = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "33 32 0:29 / /sys/fs/cgroup/memory rw,nosuid shared:14 - cgroup cgroup rw,memory\n";
    const CPU: &str = "34 32 0:30 / /sys/fs/cgroup/cpu rw,nosuid shared:15 - cgroup cgroup rw,cpu,cpuacct\n";
    /// What version 1 says where nothing is limited.
    const NONE: &str = "9223372036854771712";

    /// The limit by recorded files.
    fn recorded(name: &str, groups: &str, mounts: &str, files: &[(&str, &str)]) -> Option<u64> {
        let root = std::env::temp_dir().join(format!("headrace-cgroup-{name}-{}", std::process::id()));
        let own = [("proc/self/cgroup", groups), ("proc/self/mountinfo", mounts)];
        for (file, text) in own.iter().chain(files) {
            let file = root.join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }
        let limit = memory_limit(&root);
        std::fs::remove_dir_all(root).unwrap();
        limit
    }

    #[test]
    fn version_2_s_smallest_limit_on_the_way_to_the_root_counts() {
        let nested = [
            ("sys/fs/cgroup/memory.max", "max\n"),
            ("sys/fs/cgroup/a/memory.max", "2000000000\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/c/memory.max", "3000000000\n"),
            ("sys/fs/cgroup/other/memory.max", "1\n"),
        ];
        let nodev = "22 1 8:1 / / rw - ext4 /dev/root rw\n";
        assert_eq!(recorded("nested", "0::/a/b/c\n", &format!("{nodev}{V2}"), &nested), Some(2_000_000_000));
        assert_eq!(recorded("none", "0::/a\n", V2, &[("sys/fs/cgroup/a/memory.max", "max\n")]), None);
        // In a container's own namespace.
        let own = [("sys/fs/cgroup/memory.max", "1073741824\n")];
        assert_eq!(recorded("namespace", "0::/\n", V2, &own), Some(1 << 30));
    }

    #[test]
    fn version_1_s_limits_count_and_its_largest_number_is_larger_than_any_machine() {
        let groups = "5:cpu,cpuacct:/\n4:memory:/docker/1f\n0::/\n";
        let nested = [
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", NONE),
            ("sys/fs/cgroup/memory/docker/memory.limit_in_bytes", "4000000000"),
            ("sys/fs/cgroup/memory/docker/1f/memory.limit_in_bytes", NONE),
        ];
        assert_eq!(recorded("v1", groups, &format!("{CPU}{V1}"), &nested), Some(4_000_000_000));
        // A container that sees its own group mounted as the root.
        let mounted = V1.replace(" / /sys", " /docker/1f /sys");
        let own = [("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000000\n")];
        assert_eq!(recorded("v1-bind", groups, &mounted, &own), Some(1_000_000_000));
        // Or a group that isn't under what is mounted.
        let elsewhere = V1.replace(" / /sys", " /else /sys");
        assert_eq!(recorded("v1-elsewhere", groups, &elsewhere, &own), Some(1_000_000_000));
        let unlimited = recorded("v1-none", groups, V1, &[("sys/fs/cgroup/memory/memory.limit_in_bytes", NONE)]);
        assert!(unlimited.is_none_or(|bytes| bytes > 1 << 60));
    }

    #[test]
    fn both_versions_at_once_and_none_at_all() {
        let groups = "1:memory:/x\n0::/y\n";
        let files =
            [("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "500"), ("sys/fs/cgroup/unified/y/memory.max", "400")];
        let unified = V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ");
        assert_eq!(recorded("hybrid", groups, &format!("{V1}{unified}"), &files), Some(400));
        assert_eq!(memory_limit(Path::new("/nowhere/at/all")), None);
        assert_eq!(recorded("damaged", "x\n::\n0::/\n", "a - \n - cgroup2\n1 2 3 / - cgroup2 x y\n", &[]), None);
    }
}
