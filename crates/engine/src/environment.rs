//! Which environment variables Headrace knows, and what they may be: a name that is wrong by a letter is an error, not silence.

use std::ffi::OsString;

use crate::error::{EngineError, Result};

/// What every name begins with.
const PREFIX: &str = "HEADRACE_";

/// What a value may be, as far as it is checked here.
#[derive(Clone, Copy)]
enum Value {
    /// `0` or `1`.
    Switch,
    /// Checked where it is read.
    Any,
}

/// Every variable that Headrace, its build or its tests read.
const VARIABLES: [(&str, Value); 11] = [
    ("HEADRACE_CACHE", Value::Any),
    ("HEADRACE_SIMD", Value::Any),
    ("HEADRACE_PROFILE_OPS", Value::Switch),
    ("HEADRACE_LANE_CLOCK", Value::Switch),
    ("HEADRACE_NVRTC", Value::Any),
    ("HEADRACE_PTX_CACHE", Value::Any),
    ("HEADRACE_PTX_TARGETS", Value::Any),
    ("HEADRACE_SMOLLM2_GGUF", Value::Any),
    ("HEADRACE_MUTATIONS", Value::Any),
    ("HEADRACE_WRITE_HOSTILE", Value::Any),
    ("HEADRACE_TEST_STALE", Value::Any),
];

/// Checks this process's variables.
///
/// # Errors
/// If one that begins with `HEADRACE_` is not known, or if its value can't be read.
pub fn check() -> Result<()> {
    check_all(std::env::vars_os())
}

fn check_all(variables: impl Iterator<Item = (OsString, OsString)>) -> Result<()> {
    for (name, value) in variables {
        let name = name.to_string_lossy();
        if !name.starts_with(PREFIX) {
            continue;
        }
        let Some((known, kind)) = VARIABLES.into_iter().find(|(known, _)| *known == name) else {
            let known: Vec<&str> = VARIABLES.iter().map(|(known, _)| *known).collect();
            let what = format!("is no variable that Headrace reads; unset it. It reads {}", known.join(", "));
            return Err(EngineError::argument("environment variable", name, what));
        };
        if let Value::Switch = kind
            && !["0", "1"].iter().any(|right| value == *right)
        {
            return Err(EngineError::argument(known, value.to_string_lossy(), "must be 0 or 1"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, value: &str) -> Result<()> {
        check_all([("PATH".into(), "/bin".into()), (name.into(), value.into())].into_iter())
    }

    #[test]
    fn unknown_names_are_errors() {
        for name in ["HEADRACE_SIMDD", "HEADRACE_", "HEADRACE_simd"] {
            let said = check(name, "1").unwrap_err().to_string();
            assert!(said.contains(name) && said.contains("HEADRACE_SIMD"), "{said}");
        }
        check("HEADRACES_SIMD", "1").unwrap();
    }

    #[test]
    fn values_of_switches_are_read_or_refused() {
        for value in ["0", "1"] {
            check("HEADRACE_LANE_CLOCK", value).unwrap();
        }
        for value in ["", "yes", "2", "01"] {
            let said = check("HEADRACE_PROFILE_OPS", value).unwrap_err().to_string();
            assert_eq!(said, format!("HEADRACE_PROFILE_OPS = {value}: must be 0 or 1"));
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_value_that_is_no_text_is_refused() {
        use std::os::unix::ffi::OsStringExt;
        let value = OsString::from_vec(vec![0x31, 0xff]);
        assert!(check_all([("HEADRACE_LANE_CLOCK".into(), value)].into_iter()).is_err());
    }
}
