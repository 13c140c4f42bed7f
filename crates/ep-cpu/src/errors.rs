//! Device errors that carry a device's name.

use headrace_provider::{DeviceError, RangeKind};

/// A device's name, as its errors and log lines give it.
#[derive(Clone, Copy, Debug)]
pub struct Named(pub &'static str);

impl Named {
    /// An argument is wrong.
    pub fn invalid(self, what: impl Into<String>) -> DeviceError {
        DeviceError::Invalid { device: self.0.to_string(), what: what.into() }
    }

    /// The device failed.
    pub fn failed(self, what: impl Into<String>) -> DeviceError {
        DeviceError::Failed { device: self.0.to_string(), what: what.into() }
    }

    /// Memory or addresses are short.
    pub fn no_memory(self, what: impl ToString, bytes: u64, reason: impl ToString) -> DeviceError {
        DeviceError::OutOfMemory {
            device: self.0.to_string(),
            what: what.to_string(),
            bytes,
            reason: reason.to_string(),
        }
    }

    /// Bytes of a range that are not backed.
    pub fn outside(self, range: RangeKind, offset: u64, bytes: u64) -> DeviceError {
        self.invalid(format!("{range:?}: bytes {offset} + {bytes} are not mapped"))
    }
}

/// `offset .. offset + len` within `mapped` bytes.
pub fn span(offset: u64, len: u64, mapped: usize) -> Option<std::ops::Range<usize>> {
    let (from, end) = (usize::try_from(offset).ok()?, usize::try_from(offset.checked_add(len)?).ok()?);
    (end <= mapped).then_some(from..end)
}
