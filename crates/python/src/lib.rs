//! The PyO3 module `headrace._core`: thin. The typed facade that users import is `python/headrace`.

mod arguments;
mod engine;
mod errors;
mod guard;
mod logs;
mod result;
mod serve;
mod stream;
mod text;

use pyo3::prelude::*;

/// The compiled part of Headrace. Private: use the package `headrace`.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::engine::Engine;
    #[pymodule_export]
    use super::engine::plan;
    #[pymodule_export]
    use super::engine::{simulate, total_memory};
    #[pymodule_export]
    use super::errors::{
        BudgetError, ContextLengthError, DeviceError, EngineFailedError, HeadraceError, ModelFormatError,
        NonFiniteError, UnsupportedModelError,
    };
    #[pymodule_export]
    use super::serve::{Request, Server};
    #[pymodule_export]
    use super::stream::TokenStream;
    #[pymodule_export]
    use super::text::TextStream;

    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::logs::install(module)
    }

    /// What this machine can do, as JSON.
    #[pyfunction]
    fn probe(py: Python<'_>) -> PyResult<String> {
        super::logs::look_again(py);
        super::engine::to_json(&super::guard::detached(py, || {
            headrace_engine::environment::check()?;
            Ok(headrace_engine::probe::probe())
        })?)
    }

    /// Facts about this build, for bug reports.
    #[pyfunction]
    fn build_info() -> std::collections::BTreeMap<&'static str, String> {
        std::collections::BTreeMap::from([
            ("version", env!("CARGO_PKG_VERSION").to_string()),
            ("contract_version", headrace_numerics::CONTRACT_VERSION.to_string()),
            ("target", format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS)),
            ("profile", env!("BUILD_PROFILE").to_string()),
            ("opt_level", env!("BUILD_OPT_LEVEL").to_string()),
            ("debug_assertions", if cfg!(debug_assertions) { "on" } else { "off" }.to_string()),
            ("cpu_kernels", headrace_engine::cpu_kernels()),
        ])
    }
}
