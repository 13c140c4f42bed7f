//! Everything a step computes outside the linear layers, bit-equal to `headrace_numerics`.
//!
//! A kernel is one safe body whose loops have the contract's fixed lanes, compiled once for each instruction set:
//! the compiler may not reorder floating point, so that the bits are the body's own at every level.

pub(crate) mod argmax;
pub(crate) mod attention;
#[cfg(target_arch = "x86_64")]
pub(crate) mod attention_block;
pub(crate) mod convert;
pub(crate) mod elementwise;
pub(crate) mod norm;
pub(crate) mod rope;

/// Compiles a safe function body for AVX-512, for AVX2 and for the baseline, and makes a function that takes the
/// [`crate::simd::SimdLevel`] first and runs the right one.
macro_rules! per_level {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(level: $crate::simd::SimdLevel, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments)]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
            #[allow(clippy::too_many_arguments)]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }
            match level {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `CpuProvider::new` refuses a level that the processor lacks.
                $crate::simd::SimdLevel::Avx512Vnni => unsafe { avx512($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                $crate::simd::SimdLevel::Avx2 => unsafe { avx2($($arg),*) },
                _ => body($($arg),*),
            }
        }
    };
}
pub(crate) use per_level;
