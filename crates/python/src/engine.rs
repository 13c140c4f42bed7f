//! `_core.Engine`: the engine behind a lock, with every long call off the GIL.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use headrace_engine::{EngineError, Generation, Progress};
use headrace_model::ChatMessage;
use numpy::{IntoPyArray, PyArray2, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arguments::{LoadArguments, engine_options, generation_options, policy_kind};
use crate::errors::HeadraceError;
use crate::guard::{Signals, Stop, detached};
use crate::stream::TokenStream;

/// A generation as Python takes it: token ids, finish reason, prompt tokens, prefill seconds, decode seconds, tokens that
/// the decode steps gave.
type GenerationTuple = (Vec<u32>, &'static str, usize, f64, f64, usize);

fn tuple(g: Generation) -> GenerationTuple {
    (g.token_ids, g.finish.name(), g.prompt_tokens, g.prefill.as_secs_f64(), g.decode.as_secs_f64(), g.decode_tokens)
}

/// The engine, shared between Python objects.
pub type Shared = Arc<Mutex<headrace_engine::Engine>>;

/// The engine, for one step or one call. A call that panicked has given its exception already; what it left is checked by
/// the engine itself.
pub fn lock(shared: &Shared) -> MutexGuard<'_, headrace_engine::Engine> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a model's files hold and what a limit means for it, as JSON: `[inventory, memory or null]`.
#[pyfunction]
pub fn plan(py: Python<'_>, path: PathBuf, options: LoadArguments) -> PyResult<String> {
    let options = engine_options(options)?;
    to_json(&detached(py, move || Ok(headrace_engine::Engine::plan(&path, &options)?))?)
}

/// What each of the named residency policies would move, as JSON.
#[pyfunction]
pub fn simulate(
    py: Python<'_>,
    path: PathBuf,
    options: LoadArguments,
    policies: Vec<String>,
    steps: u64,
) -> PyResult<String> {
    let options = engine_options(options)?;
    let kinds = policies.iter().map(|name| policy_kind(name)).collect::<PyResult<Vec<_>>>()?;
    to_json(&detached(py, move || Ok(headrace_engine::Engine::simulate(&path, &options, &kinds, steps)?))?)
}

/// JSON of a report.
pub fn to_json<T: serde::Serialize>(value: &T) -> PyResult<String> {
    serde_json::to_string(value).map_err(|e| HeadraceError::new_err(e.to_string()))
}

/// A loaded model on a device.
#[pyclass(module = "headrace._core", frozen)]
pub struct Engine {
    shared: Shared,
}

#[pymethods]
impl Engine {
    /// Loads a model.
    #[staticmethod]
    fn load(py: Python<'_>, path: PathBuf, options: LoadArguments) -> PyResult<Engine> {
        let options = engine_options(options)?;
        let engine = detached(py, move || Ok(headrace_engine::Engine::load(&path, options)?))?;
        Ok(Engine { shared: Arc::new(Mutex::new(engine)) })
    }

    /// Token ids of a text.
    #[pyo3(signature = (text, *, add_special))]
    fn encode(&self, py: Python<'_>, text: &str, add_special: bool) -> PyResult<Vec<u32>> {
        detached(py, || {
            let engine = lock(&self.shared);
            Ok(engine.require_tokenizer()?.encode(text, add_special).map_err(EngineError::from)?)
        })
    }

    /// Text of token ids.
    #[pyo3(signature = (ids, *, skip_special))]
    fn decode(&self, py: Python<'_>, ids: Vec<u32>, skip_special: bool) -> PyResult<String> {
        detached(py, || {
            let engine = lock(&self.shared);
            Ok(engine.require_tokenizer()?.decode(&ids, skip_special).map_err(EngineError::from)?)
        })
    }

    /// The text that the model's chat template makes of `(role, content)` pairs.
    #[pyo3(signature = (messages, *, add_generation_prompt))]
    fn apply_chat_template(
        &self,
        py: Python<'_>,
        messages: Vec<(String, String)>,
        add_generation_prompt: bool,
    ) -> PyResult<String> {
        let messages: Vec<ChatMessage> =
            messages.into_iter().map(|(role, content)| ChatMessage { role, content }).collect();
        detached(py, || {
            let engine = lock(&self.shared);
            let tokenizer = engine.require_tokenizer()?;
            Ok(tokenizer.apply_chat_template(&messages, add_generation_prompt).map_err(EngineError::from)?)
        })
    }

    /// True if the model's files hold a chat template.
    #[getter]
    fn has_chat_template(&self) -> bool {
        lock(&self.shared).tokenizer().is_some_and(|t| t.has_chat_template())
    }

    /// True if the model's files hold a tokenizer.
    #[getter]
    fn has_tokenizer(&self) -> bool {
        lock(&self.shared).tokenizer().is_some()
    }

    /// Tokens that end a generation by the model's own word.
    #[getter]
    fn eos_token_ids(&self) -> Vec<u32> {
        lock(&self.shared).model().special.eos.clone()
    }

    /// Most positions of a sequence.
    #[getter]
    fn max_context(&self) -> usize {
        lock(&self.shared).max_context()
    }

    /// Vocabulary.
    #[getter]
    fn vocab_size(&self) -> usize {
        lock(&self.shared).model().config.vocab
    }

    /// Runs one generation to its end.
    #[pyo3(signature = (prompt, *, max_new_tokens, temperature, top_k, top_p, seed, stop_tokens, progress))]
    #[allow(clippy::too_many_arguments)]
    fn generate(
        &self,
        py: Python<'_>,
        prompt: Vec<u32>,
        max_new_tokens: Option<usize>,
        temperature: f32,
        top_k: usize,
        top_p: f32,
        seed: u64,
        stop_tokens: Vec<u32>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<GenerationTuple> {
        let options = generation_options(max_new_tokens, temperature, top_k, top_p, seed, stop_tokens);
        self.watched(py, progress, |engine, hook| engine.generate(&prompt, options, hook)).map(tuple)
    }

    /// Starts a generation whose tokens are taken one by one.
    #[pyo3(signature = (prompt, *, max_new_tokens, temperature, top_k, top_p, seed, stop_tokens))]
    #[allow(clippy::too_many_arguments)]
    fn stream(
        &self,
        py: Python<'_>,
        prompt: Vec<u32>,
        max_new_tokens: Option<usize>,
        temperature: f32,
        top_k: usize,
        top_p: f32,
        seed: u64,
        stop_tokens: Vec<u32>,
    ) -> PyResult<TokenStream> {
        let options = generation_options(max_new_tokens, temperature, top_k, top_p, seed, stop_tokens);
        detached(py, || Ok(TokenStream::start(self.shared.clone(), &prompt, options)?))
    }

    /// Runs one greedy generation for each prompt.
    #[pyo3(signature = (prompts, *, max_new_tokens, stop_tokens, progress))]
    fn decode_greedy_batch(
        &self,
        py: Python<'_>,
        prompts: Vec<Vec<u32>>,
        max_new_tokens: usize,
        stop_tokens: Vec<u32>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Vec<GenerationTuple>> {
        let all = self.watched(py, progress, |engine, hook| {
            engine.decode_greedy_batch(&prompts, max_new_tokens, &stop_tokens, hook)
        })?;
        Ok(all.into_iter().map(tuple).collect())
    }

    /// Logits of token rows, `(rows, vocab)`.
    #[pyo3(signature = (sequences, *, last_only))]
    fn logits<'py>(
        &self,
        py: Python<'py>,
        sequences: Vec<Vec<u32>>,
        last_only: bool,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let logits = self.watched(py, None, |engine, hook| engine.logits(&sequences, last_only, hook))?;
        logits
            .values
            .into_pyarray(py)
            .reshape([logits.rows, logits.vocab])
            .map_err(|e| PyValueError::new_err(e.to_string()))
    }

    /// What the model's files hold and what the limit means now, as JSON: `[inventory, memory or null]`.
    fn plan(&self, py: Python<'_>) -> PyResult<String> {
        to_json(&detached(py, || {
            let engine = lock(&self.shared);
            Ok((engine.inventory(), engine.memory()))
        })?)
    }

    /// Changes the memory limit of the live engine.
    fn set_vram_limit(&self, py: Python<'_>, bytes: u64) -> PyResult<()> {
        detached(py, || Ok(lock(&self.shared).set_vram_limit(bytes)?))
    }

    /// A checksum of every resident piece of weights, read back from the device; `None` for a cold one.
    fn weight_checksums(&self, py: Python<'_>) -> PyResult<Vec<Option<u64>>> {
        detached(py, || Ok(lock(&self.shared).weight_checksums()?))
    }

    /// What a residency policy made of each tensor's reads, as JSON.
    fn residency_trace(&self, py: Python<'_>) -> PyResult<String> {
        to_json(&detached(py, || Ok(lock(&self.shared).residency_trace()))?)
    }

    /// The counters, as JSON.
    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        to_json(&detached(py, || Ok(lock(&self.shared).stats()?))?)
    }

    /// Opens a new window for the totals.
    fn reset_stats(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || {
            lock(&self.shared).reset_stats();
            Ok(())
        })
    }
}

impl Engine {
    /// Runs `work` without the GIL; between steps, looks for signals and calls `progress(prompt_done, prompt_total,
    /// new_tokens)`.
    fn watched<T: Send>(
        &self,
        py: Python<'_>,
        progress: Option<Py<PyAny>>,
        work: impl FnOnce(&mut headrace_engine::Engine, &mut headrace_engine::Hook<'_>) -> headrace_engine::Result<T> + Send,
    ) -> PyResult<T> {
        detached(py, || -> Result<T, Stop> {
            let mut signals = Signals::new();
            let mut hook = |p: Progress| {
                signals.check(|py| match &progress {
                    Some(callback) => callback.call1(py, (p.prompt_done, p.prompt_total, p.new_tokens)).map(drop),
                    None => Ok(()),
                })
            };
            let result = work(&mut lock(&self.shared), &mut hook);
            signals.settle(result)
        })
    }
}
