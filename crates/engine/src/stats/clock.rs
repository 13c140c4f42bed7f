//! Time, by the host's clock and by the device's, against measured ceilings.

use headrace_provider::ClockReport;
use serde::Serialize;

/// Time. Totals in seconds by the host's monotonic clock, from the submission of a step, or from the results of the step before
/// if they came later, to its results.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TimeStats {
    /// Loading the engine. Gauge.
    pub load_seconds: f64,
    /// What loading it was spent on, in order: `files`, `device`, `attach`, `kernels`, `plan`, `weights`, `pages`. Gauge.
    pub load_parts: Vec<(String, f64)>,
    /// Steps that hold prompt rows.
    pub prefill_seconds: f64,
    /// Steps that hold none.
    pub decode_seconds: f64,
    /// Steps that hold no prompt rows: what `decode_seconds` is the time of.
    pub decode_steps: u64,
    /// Tokens that these steps gave.
    pub decode_tokens: u64,
}

/// Time by the device's own clock: events on a card, the copy thread's and the workers' clocks on the host device. Totals, but for
/// the gauges; all of it 0 on a device that reads weights in place.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ClockStats {
    /// Steps that have ended.
    pub steps: u64,
    /// Seconds from the moment that the device turns to a step to the end of its last kernel and last copy.
    pub step_seconds: f64,
    /// Bytes that they copied into the ring.
    pub copied_bytes: u64,
    /// Steps of which the device knows what its lanes did: those after which nothing was in flight, or all.
    pub sampled_steps: u64,
    /// Their seconds.
    pub sampled_seconds: f64,
    /// Seconds in which their copies into the ring were under way.
    pub copy_seconds: f64,
    /// Seconds in which their kernels didn't wait for copies.
    pub compute_seconds: f64,
    /// Bytes a second of copies while they were under way; `None` where nothing was sampled.
    pub copy_rate: Option<f64>,
    /// Bytes a second that kernels read of the device's memory, over whole steps; `None` where nothing was timed.
    pub read_rate: Option<f64>,
    /// Bytes a second that the link carries at most, as measured when the ring was first mapped. Gauge.
    pub link_ceiling: Option<f64>,
    /// Bytes a second that the device's memory gives at most, by its clock and width. Gauge.
    pub memory_ceiling: Option<f64>,
    /// Copied bytes over step seconds and the link's ceiling.
    pub link_utilisation: Option<f64>,
    /// Figures above what the machine can do: such an instrument is broken, and its figure means nothing.
    pub broken_instruments: Vec<String>,
}

/// A figure this much above its ceiling is taken for broken: measured ceilings vary by a percent or two.
const TOLERANCE: f64 = 1.03;

/// Bytes that a step has to read at least for the memory's ceiling to bind: less may come out of a cache.
const BEYOND_CACHES: u64 = 512 << 20;

impl ClockStats {
    /// The totals of a window that opened at `before`, in which steps read `read` bytes of device memory.
    pub fn between(before: &ClockReport, now: &ClockReport, read: u64) -> ClockStats {
        let per = |bytes: u64, seconds: f64| (bytes > 0 && seconds > 0.0).then(|| bytes as f64 / seconds);
        let steps = now.steps - before.steps;
        let step_seconds = now.step_seconds - before.step_seconds;
        let copied_bytes = now.copied_bytes - before.copied_bytes;
        let copy_seconds = now.copy_seconds - before.copy_seconds;
        let copy_rate = per(now.sampled_bytes - before.sampled_bytes, copy_seconds);
        let read_rate = per(read, step_seconds);
        let over_steps = per(copied_bytes, step_seconds);
        let mut stats = ClockStats {
            steps,
            step_seconds,
            copied_bytes,
            sampled_steps: now.sampled_steps - before.sampled_steps,
            sampled_seconds: now.sampled_seconds - before.sampled_seconds,
            copy_seconds,
            compute_seconds: now.compute_seconds - before.compute_seconds,
            copy_rate,
            read_rate,
            link_ceiling: now.link_ceiling,
            memory_ceiling: now.memory_ceiling,
            link_utilisation: over_steps.zip(now.link_ceiling).map(|(rate, ceiling)| rate / ceiling),
            broken_instruments: Vec::new(),
        };
        let mut check = |name: &str, rate: Option<f64>, ceiling: Option<f64>| {
            if let Some((rate, ceiling)) = rate.zip(ceiling).filter(|(rate, ceiling)| *rate > ceiling * TOLERANCE) {
                let (rate, ceiling) = (rate / 1e9, ceiling / 1e9);
                stats.broken_instruments.push(format!("{name}: {rate:.1} GB/s, above a ceiling of {ceiling:.1} GB/s"));
            }
        };
        check("copies while under way", copy_rate, now.link_ceiling);
        check("copies over whole steps", over_steps, now.link_ceiling);
        let beyond = read / steps.max(1) >= BEYOND_CACHES;
        check("reads of device memory", read_rate.filter(|_| beyond), now.memory_ceiling);
        stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_above_its_ceiling_is_a_broken_instrument() {
        let report = |copied: u64, seconds: f64, copying: f64| ClockReport {
            steps: 10,
            step_seconds: seconds,
            copied_bytes: copied,
            sampled_steps: 10,
            sampled_bytes: copied,
            sampled_seconds: seconds,
            copy_seconds: copying,
            link_ceiling: Some(50e9),
            memory_ceiling: Some(4e12),
            ..ClockReport::default()
        };
        let none = ClockReport { link_ceiling: Some(50e9), ..ClockReport::default() };
        let good = ClockStats::between(&none, &report(49_000_000_000, 1.0, 0.99), 3_900_000_000_000);
        assert_eq!(good.broken_instruments, Vec::<String>::new());
        assert_eq!((good.steps, good.link_utilisation), (10, Some(0.98)));
        assert!(good.copy_rate.is_some_and(|rate| rate > 49e9 && rate < 50e9));
        let copies = ClockStats::between(&none, &report(49_000_000_000, 1.0, 0.9), 0).broken_instruments;
        assert!(copies.len() == 1 && copies[0].starts_with("copies while under way: 54.4 GB/s"), "{copies:?}");
        let all = ClockStats::between(&none, &report(60_000_000_000, 1.0, 1.0), 5_000_000_000_000);
        assert_eq!(all.broken_instruments.len(), 3, "{all:?}");
        // What fits a cache may be read faster than memory is.
        let cached = ClockStats::between(&none, &report(1, 1e-6, 1.0), 5_000_000_000);
        assert_eq!(cached.broken_instruments, Vec::<String>::new());
        // Nothing timed, nothing said.
        let empty = ClockStats::between(&none, &none, 0);
        assert_eq!((empty.copy_rate, empty.read_rate, empty.link_utilisation), (None, None, None));
    }
}
