//! What a load spends its time on: a clock that is read between its parts.

use std::time::{Duration, Instant};

/// Parts of a load and their times, in order. The time between two readings belongs to the part that the second one names.
#[derive(Clone, Debug)]
pub(crate) struct Laps {
    last: Instant,
    parts: Vec<(&'static str, Duration)>,
}

impl Laps {
    /// Starts the clock.
    pub(crate) fn start() -> Laps {
        Laps { last: Instant::now(), parts: Vec::new() }
    }

    /// Ends a part.
    pub(crate) fn end(&mut self, part: &'static str) {
        let now = Instant::now();
        self.parts.push((part, now - self.last));
        self.last = now;
    }

    /// Seconds of each part.
    pub(crate) fn parts(&self) -> Vec<(String, f64)> {
        self.parts.iter().map(|(part, time)| (part.to_string(), time.as_secs_f64())).collect()
    }

    /// Seconds of all of them.
    pub(crate) fn seconds(&self) -> f64 {
        self.parts.iter().map(|(_, time)| time.as_secs_f64()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parts_time_is_its_own() {
        let mut laps = Laps::start();
        std::thread::sleep(Duration::from_millis(20));
        laps.end("slow");
        laps.end("fast");
        let parts = laps.parts();
        assert_eq!(parts.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["slow", "fast"]);
        assert!(parts[0].1 >= 0.02 && parts[1].1 < parts[0].1, "{parts:?}");
        assert!((laps.seconds() - parts[0].1 - parts[1].1).abs() < 1e-9);
    }
}
