//! Which instruction set the kernels use: found at run time, or forced by the `HEADRACE_SIMD` environment variable.

use std::fmt;

/// The variable that forces a level: `scalar`, `avx2` or `avx512`.
pub const SIMD_VARIABLE: &str = "HEADRACE_SIMD";

/// An instruction set that kernels exist for. All levels give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SimdLevel {
    /// Portable code.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 with F, BW, DQ, VL, VNNI and VBMI (Ice Lake, Zen 4 and later), beside all of [`SimdLevel::Avx2`].
    Avx512Vnni,
}

/// Why the level that [`SIMD_VARIABLE`] asks for can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimdError {
    /// The value names no level.
    #[error("HEADRACE_SIMD is {value:?}; it must be scalar, avx2 or avx512")]
    Unknown {
        /// The value found.
        value: String,
    },
    /// The processor lacks the level.
    #[error("HEADRACE_SIMD asks for {wanted}, but this processor offers {best} at most")]
    Unavailable {
        /// The level asked for.
        wanted: SimdLevel,
        /// The best level available.
        best: SimdLevel,
    },
}

impl fmt::Display for SimdLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SimdLevel::Scalar => "scalar",
            SimdLevel::Avx2 => "avx2",
            SimdLevel::Avx512Vnni => "avx512",
        })
    }
}

impl SimdLevel {
    /// True if this processor has the level.
    pub fn is_available(self) -> bool {
        match self {
            SimdLevel::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512Vnni => {
                SimdLevel::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
                    && is_x86_feature_detected!("avx512vbmi")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The levels of this processor, the best one last.
    pub fn available() -> Vec<SimdLevel> {
        [SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512Vnni].into_iter().filter(|l| l.is_available()).collect()
    }

    /// The best level of this processor.
    pub fn best() -> SimdLevel {
        Self::available().last().copied().unwrap_or(SimdLevel::Scalar)
    }

    /// The level to run with: what [`SIMD_VARIABLE`] asks for, or else the best one.
    ///
    /// # Errors
    /// If the variable is set to an unknown value, or to a level that this processor lacks.
    pub fn detect() -> Result<SimdLevel, SimdError> {
        match std::env::var_os(SIMD_VARIABLE) {
            None => Ok(Self::best()),
            Some(value) => Self::choose(&value.to_string_lossy()),
        }
    }

    /// The level that `value`, a value of [`SIMD_VARIABLE`], asks for.
    ///
    /// # Errors
    /// As [`SimdLevel::detect`].
    pub fn choose(value: &str) -> Result<SimdLevel, SimdError> {
        let wanted = match value {
            "scalar" => SimdLevel::Scalar,
            "avx2" => SimdLevel::Avx2,
            "avx512" => SimdLevel::Avx512Vnni,
            _ => return Err(SimdError::Unknown { value: value.to_owned() }),
        };
        if wanted.is_available() { Ok(wanted) } else { Err(SimdError::Unavailable { wanted, best: Self::best() }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_value_is_an_error() {
        assert_eq!(SimdLevel::choose("sse9"), Err(SimdError::Unknown { value: "sse9".to_owned() }));
        assert!(SimdLevel::choose("").is_err());
        assert_eq!(SimdLevel::choose("scalar"), Ok(SimdLevel::Scalar));
    }

    #[test]
    fn every_available_level_can_be_forced_and_the_others_not() {
        for level in [SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512Vnni] {
            assert_eq!(SimdLevel::choose(&level.to_string()).is_ok(), level.is_available());
        }
    }
}
