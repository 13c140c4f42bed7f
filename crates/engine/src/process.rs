//! Which process something belongs to: threads, locks and a card's context don't survive a fork.

use crate::error::{EngineError, Result};

/// The process in which an engine was loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process(u32);

impl Process {
    /// This one.
    pub fn current() -> Process {
        Process(std::process::id())
    }

    /// True in the process itself, false in a fork of it. There, nothing that waits for another thread or holds a lock may be
    /// touched: the threads are gone, and a lock that one of them held stays locked.
    pub fn is_current(self) -> bool {
        self == Process::current()
    }

    /// To be asked before anything else.
    ///
    /// # Errors
    /// [`EngineError::Forked`] in a fork.
    pub fn check(self) -> Result<()> {
        match self.is_current() {
            true => Ok(()),
            false => Err(EngineError::Forked { loaded_in: self.0 }),
        }
    }
}

/// The name of something that this process shares with no fork of it.
pub(crate) fn own(name: &str) -> String {
    format!("{name} of process {}", std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_process_is_told_from_this_one() {
        assert!(Process::current().check().is_ok());
        let other = Process(std::process::id() ^ 1);
        let text = other.check().unwrap_err().to_string();
        assert!(text.contains("fork") && text.contains("\"spawn\"") && !other.is_current(), "{text}");
    }
}
