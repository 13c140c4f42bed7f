//! A finished generation in the form in which Python takes it.

use headrace_engine::Generation;
use numpy::{IntoPyArray, PyArray2, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Token ids, finish reason, prompt tokens, prefill seconds, decode seconds, tokens that the decode steps gave, drafted tokens,
/// accepted ones, and the logits `(choices, vocab)` if they were kept.
pub type GenerationTuple<'py> =
    (Vec<u32>, &'static str, usize, f64, f64, usize, usize, usize, Option<Bound<'py, PyArray2<f32>>>);

/// `generation` of a model with `vocab` tokens.
pub fn to_tuple(py: Python<'_>, generation: Generation, vocab: usize) -> PyResult<GenerationTuple<'_>> {
    let g = generation;
    let logits = match g.logits.is_empty() {
        true => None,
        false => Some(matrix(py, g.logits, vocab)?),
    };
    let (prefill, decode) = (g.prefill.as_secs_f64(), g.decode.as_secs_f64());
    Ok((g.token_ids, g.finish.name(), g.prompt_tokens, prefill, decode, g.decode_tokens, g.drafted, g.accepted, logits))
}

/// `values` as rows of `columns`.
pub fn matrix(py: Python<'_>, values: Vec<f32>, columns: usize) -> PyResult<Bound<'_, PyArray2<f32>>> {
    let rows = values.len() / columns.max(1);
    values.into_pyarray(py).reshape([rows, columns]).map_err(|e| PyValueError::new_err(e.to_string()))
}
