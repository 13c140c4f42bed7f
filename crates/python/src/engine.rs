//! `_core.Engine`: the engine behind a lock, with every long call off the GIL.

use std::path::PathBuf;
use std::sync::Arc;

use headrace_engine::serve::SharedEngine;
use headrace_engine::{EngineError, Progress};
use headrace_model::Conversation;
use headrace_model::tokenizer::Tokenizer;
use numpy::PyArray2;
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arguments::{GenerateArguments, LoadArguments, device_choice, engine_options, policy_kind};
use crate::errors::HeadraceError;
use crate::guard::{Signals, Stop, Turn, Waiting, detached, may_wait};
use crate::logs;
use crate::result::{GenerationTuple, matrix, to_tuple};
use crate::serve::Server;
use crate::stream::TokenStream;
use crate::text::TextStream;

/// What a model's files hold and what a limit means for it and for batches of sequences of `length` positions, as JSON:
/// `[inventory, [memory, trade] or null]`.
#[pyfunction]
#[pyo3(signature = (path, options, length))]
pub fn plan(py: Python<'_>, path: PathBuf, options: LoadArguments, length: Option<usize>) -> PyResult<String> {
    let options = engine_options(options)?;
    logs::look_again(py);
    to_json(&detached(py, move || Ok(headrace_engine::Engine::plan(&path, &options, length)?))?)
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
    logs::look_again(py);
    to_json(&detached(py, move || {
        let mut signals = Signals::new();
        let mut hook = || signals.check(|_| Ok(()));
        let result = headrace_engine::Engine::simulate(&path, &options, &kinds, steps, &mut hook);
        signals.settle(result)
    })?)
}

/// Bytes of memory of the device of that name. `ValueError` says why it has no such figure.
#[pyfunction]
pub fn total_memory(py: Python<'_>, device: &str) -> PyResult<u64> {
    let device = device_choice(device)?;
    detached(py, || Ok(headrace_engine::total_memory(device)))?.map_err(PyValueError::new_err)
}

/// JSON of a report.
pub fn to_json<T: serde::Serialize>(value: &T) -> PyResult<String> {
    serde_json::to_string(value).map_err(|e| HeadraceError::new_err(e.to_string()))
}

/// A loaded model on a device.
#[pyclass(module = "headrace._core", frozen)]
pub struct Engine {
    shared: Waiting<SharedEngine>,
    /// What never changes, so that nobody waits for a step to learn it.
    tokenizer: Option<Arc<Tokenizer>>,
    eos: Vec<u32>,
    max_context: usize,
    vocab: usize,
    device: String,
}

#[pymethods]
impl Engine {
    /// Loads a model.
    #[staticmethod]
    fn load(py: Python<'_>, path: PathBuf, options: LoadArguments) -> PyResult<Engine> {
        let options = engine_options(options)?;
        logs::look_again(py);
        let engine = detached(py, move || {
            may_wait()?;
            Ok(headrace_engine::Engine::load(&path, options)?)
        })?;
        Ok(Engine {
            tokenizer: engine.tokenizer().cloned(),
            eos: engine.model().special.eos.clone(),
            max_context: engine.max_context(),
            vocab: engine.model().config.vocab,
            device: engine.device().name,
            shared: Waiting::new(Arc::new(Mutex::new(engine))),
        })
    }

    /// Token ids of a text.
    #[pyo3(signature = (text, *, add_special, parse_special))]
    fn encode(&self, py: Python<'_>, text: &str, add_special: bool, parse_special: bool) -> PyResult<Vec<u32>> {
        detached(py, || {
            Ok(self.tokenizer()?.encode_with(text, add_special, parse_special).map_err(EngineError::from)?)
        })
    }

    /// Text of token ids.
    #[pyo3(signature = (ids, *, skip_special))]
    fn decode(&self, py: Python<'_>, ids: Vec<u32>, skip_special: bool) -> PyResult<String> {
        detached(py, || Ok(self.tokenizer()?.decode(&ids, skip_special).map_err(EngineError::from)?))
    }

    /// A text that comes token by token, special tokens left out.
    fn text_stream(&self) -> TextStream {
        TextStream::new(self.tokenizer.as_deref())
    }

    /// The text that the model's chat template makes of messages and variables, both as JSON.
    #[pyo3(signature = (messages, variables, *, add_generation_prompt))]
    fn apply_chat_template(
        &self,
        py: Python<'_>,
        messages: &str,
        variables: &str,
        add_generation_prompt: bool,
    ) -> PyResult<String> {
        detached(py, || {
            let chat =
                Conversation::from_json(messages, variables, add_generation_prompt).map_err(EngineError::from)?;
            Ok(self.tokenizer()?.render_chat(&chat).map_err(EngineError::from)?)
        })
    }

    /// The token ids of that, in which control tokens in messages and variables are plain text.
    #[pyo3(signature = (messages, variables, *, add_generation_prompt))]
    fn chat_token_ids(
        &self,
        py: Python<'_>,
        messages: &str,
        variables: &str,
        add_generation_prompt: bool,
    ) -> PyResult<Vec<u32>> {
        detached(py, || {
            let chat =
                Conversation::from_json(messages, variables, add_generation_prompt).map_err(EngineError::from)?;
            Ok(self.tokenizer()?.encode_chat(&chat).map_err(EngineError::from)?)
        })
    }

    /// True if the model's files hold a chat template.
    #[getter]
    fn has_chat_template(&self) -> bool {
        self.tokenizer.as_ref().is_some_and(|t| t.has_chat_template())
    }

    /// True if the model's files hold a tokenizer.
    #[getter]
    fn has_tokenizer(&self) -> bool {
        self.tokenizer.is_some()
    }

    /// Tokens that end a generation by the model's own word.
    #[getter]
    fn eos_token_ids(&self) -> Vec<u32> {
        self.eos.clone()
    }

    /// Name of the device that computes.
    #[getter]
    fn device(&self) -> &str {
        &self.device
    }

    /// Most positions of a sequence.
    #[getter]
    fn max_context(&self) -> usize {
        self.max_context
    }

    /// Vocabulary.
    #[getter]
    fn vocab_size(&self) -> usize {
        self.vocab
    }

    /// Runs one generation to its end.
    fn generate<'py>(
        &self,
        py: Python<'py>,
        prompt: Vec<u32>,
        options: GenerateArguments,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<GenerationTuple<'py>> {
        let options = options.into();
        let result = self.watched(py, progress, |engine, hook| engine.generate(&prompt, options, hook))?;
        to_tuple(py, result, self.vocab)
    }

    /// Runs a generation for each prompt, as many at once as there are seats and pages.
    fn generate_all<'py>(
        &self,
        py: Python<'py>,
        prompts: Vec<(Vec<u32>, GenerateArguments)>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Vec<GenerationTuple<'py>>> {
        let requests = prompts.into_iter().map(|(prompt, options)| (prompt, options.into())).collect();
        let results = self.watched(py, progress, |engine, hook| engine.generate_all(requests, hook))?;
        results.into_iter().map(|result| to_tuple(py, result, self.vocab)).collect()
    }

    /// Starts a generation whose tokens are taken one by one.
    fn stream(
        &self,
        py: Python<'_>,
        prompt: Vec<u32>,
        options: GenerateArguments,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<TokenStream> {
        TokenStream::start(py, &self.shared, &prompt, options.into(), progress)
    }

    /// Starts a thread that runs continuous generation on this engine.
    fn serve(&self, py: Python<'_>) -> PyResult<Server> {
        Server::start(py, &self.shared, self.vocab)
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
        matrix(py, logits.values, logits.vocab)
    }

    /// What the model's files hold and what the limit means now, as JSON: `[inventory, [memory, trade] or null]`.
    #[pyo3(signature = (length))]
    fn plan(&self, py: Python<'_>, length: Option<usize>) -> PyResult<String> {
        to_json(&detached(py, || {
            let engine = Turn::wait(&self.shared)?;
            engine.check_usable()?;
            Ok((engine.inventory(), engine.memory().zip(engine.trade(length))))
        })?)
    }

    /// Changes the memory limit of the live engine.
    fn set_vram_limit(&self, py: Python<'_>, bytes: u64) -> PyResult<()> {
        logs::look_again(py);
        detached(py, || Ok(Turn::wait(&self.shared)?.set_vram_limit(bytes)?))
    }

    /// A checksum of every resident piece of weights, read back from the device; `None` for a cold one.
    fn weight_checksums(&self, py: Python<'_>) -> PyResult<Vec<Option<u64>>> {
        detached(py, || Ok(Turn::wait(&self.shared)?.weight_checksums()?))
    }

    /// What a residency policy made of each tensor's reads, as JSON.
    fn residency_trace(&self, py: Python<'_>) -> PyResult<String> {
        to_json(&detached(py, || {
            let engine = Turn::wait(&self.shared)?;
            engine.check_usable()?;
            Ok(engine.residency_trace())
        })?)
    }

    /// The counters, as JSON.
    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        to_json(&detached(py, || Ok(Turn::wait(&self.shared)?.stats()?))?)
    }

    /// Opens a new window for the totals.
    fn reset_stats(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || {
            Turn::wait(&self.shared)?.reset_stats()?;
            Ok(())
        })
    }
}

impl Engine {
    fn tokenizer(&self) -> Result<&Tokenizer, EngineError> {
        self.tokenizer.as_deref().ok_or(EngineError::NoTokenizer)
    }

    /// Runs `work` without the GIL; between steps, looks for signals and calls `progress(prompt_done, prompt_total,
    /// new_tokens)`.
    fn watched<T: Send>(
        &self,
        py: Python<'_>,
        progress: Option<Py<PyAny>>,
        work: impl FnOnce(&mut headrace_engine::Engine, &mut headrace_engine::Hook<'_>) -> headrace_engine::Result<T> + Send,
    ) -> PyResult<T> {
        logs::look_again(py);
        detached(py, || -> Result<T, Stop> {
            let mut signals = Signals::new();
            let mut hook = |p: Progress| {
                signals.check(|py| match &progress {
                    Some(callback) => callback.call1(py, (p.prompt_done, p.prompt_total, p.new_tokens)).map(drop),
                    None => Ok(()),
                })
            };
            let result = work(&mut *Turn::wait(&self.shared)?, &mut hook);
            signals.settle(result)
        })
    }
}
