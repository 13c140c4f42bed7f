//! From a path to an engine on a device; and what a limit would mean for a model without loading it.

use std::path::Path;
use std::sync::Arc;

use headrace_model::tokenizer::Tokenizer;
use headrace_model::{Model, ModelSpec};
use headrace_provider::{DeviceReport, Provider, StepInput, StepOutput};

use super::flight::Flights;
use super::{Counters, Engine};
use crate::cards::AbsentCard;
use crate::error::{EngineError, Result};
use crate::home::Home;
use crate::inventory::Inventory;
use crate::kv_state::KvState;
use crate::laps::Laps;
use crate::options::EngineOptions;
use crate::paged::PagedCounters;
use crate::plan::MemoryReport;
use crate::process::Process;
use crate::residency::{PolicyKind, Simulation, simulate};
use crate::setup::{Chosen, Device, Setup, UNLIMITED};
use crate::trade::Trade;

impl Engine {
    /// Loads the model at `path` (a GGUF file, an ONNX directory or its `.onnx` file) onto a device.
    pub fn load(path: &Path, options: EngineOptions) -> Result<Engine> {
        let mut laps = Laps::start();
        crate::environment::check()?;
        options.check()?;
        let Model { spec, tokenizer } = headrace_model::load(path)?;
        laps.end("files");
        Engine::open(Arc::new(spec), tokenizer, options, laps)
    }

    /// An engine for a model that is in memory already.
    ///
    /// # Errors
    /// As [`Engine::load`].
    pub fn from_spec(model: Arc<ModelSpec>, tokenizer: Option<Tokenizer>, options: EngineOptions) -> Result<Engine> {
        Engine::open(model, tokenizer, options, Laps::start())
    }

    fn open(
        model: Arc<ModelSpec>,
        tokenizer: Option<Tokenizer>,
        options: EngineOptions,
        mut laps: Laps,
    ) -> Result<Engine> {
        let setup = Setup::new(&model, &options)?;
        let chosen = setup.device(&options)?;
        laps.end("device");
        Engine::assemble(model, tokenizer, options, setup, chosen, laps)
    }

    /// An engine on a device of the caller's making, with memory of its own, of which `limit` bytes may be used. The device of
    /// `options` is not looked at.
    ///
    /// # Errors
    /// As [`Engine::load`].
    pub fn on_device(
        model: Arc<ModelSpec>,
        tokenizer: Option<Tokenizer>,
        options: EngineOptions,
        device: Box<dyn Provider>,
        limit: u64,
    ) -> Result<Engine> {
        let setup = Setup::new(&model, &options)?;
        let chosen = Chosen { device: Device::Paged(device, limit), asked_for: String::new() };
        Engine::assemble(model, tokenizer, options, setup, chosen, Laps::start())
    }

    fn assemble(
        model: Arc<ModelSpec>,
        tokenizer: Option<Tokenizer>,
        options: EngineOptions,
        setup: Setup,
        chosen: Chosen,
        mut laps: Laps,
    ) -> Result<Engine> {
        let model = chosen.device.arranged(&model);
        let home = match chosen.device {
            Device::InPlace(provider) => {
                Home::in_place(provider, &model, setup.geometry, setup.max_context, &options, &mut laps)?
            }
            Device::Paged(provider, limit) => {
                Home::paged(provider, &model, &options, setup.sizes(&options, limit), &mut laps)?
            }
        };
        let kv = KvState::new(setup.geometry, setup.max_context, options.max_batch, &home)?;
        laps.end("pages");
        Ok(Engine {
            model,
            tokenizer: tokenizer.map(Arc::new),
            options,
            max_context: setup.max_context,
            device: home.info(),
            process: Process::current(),
            home,
            kv,
            input: StepInput::default(),
            output: StepOutput::default(),
            flights: Flights::default(),
            said_depth: false,
            counters: Counters::default(),
            before: PagedCounters::default(),
            device_before: DeviceReport::default(),
            laps,
            asked_for: chosen.asked_for,
        })
    }

    /// What the model at `path` holds, and what the limit of `options` would mean for it and for batches of sequences of
    /// `length` positions, without loading anything. A card that isn't here is planned for with assumed figures, and the report
    /// says so.
    ///
    /// # Errors
    /// As [`Engine::load`], but for a missing card.
    pub fn plan(
        path: &Path,
        options: &EngineOptions,
        length: Option<usize>,
    ) -> Result<(Inventory, Option<(MemoryReport, Trade)>)> {
        let model = Arc::new(headrace_model::load(path)?.spec);
        let setup = Setup::new(&model, options)?;
        let length = length.unwrap_or(setup.max_context);
        let plan = |device: Device, options: &EngineOptions, absent: Option<&AbsentCard>| {
            let arranged = device.arranged(&model);
            match device {
                Device::InPlace(_) => Ok(None),
                Device::Paged(provider, limit) => {
                    let sizes = setup.sizes(options, limit);
                    Home::plan_paged(provider, &arranged, options, sizes, length, absent).map(Some)
                }
            }
        };
        let memory = match AbsentCard::wanted(options) {
            Some(card) => {
                let limit = options.vram_limit.unwrap_or(UNLIMITED);
                let device = Device::Paged(card.stand_in(setup.max_context)?, limit);
                plan(device, &card.options(options), Some(&card))?
            }
            None => plan(setup.device(options)?.device, options, None)?,
        };
        Ok((Inventory::of(&model), memory))
    }

    /// What each policy of `kinds` would move for the model at `path` under the limit of `options`, over `steps` steps, without
    /// loading anything. The hook is called before every step.
    ///
    /// # Errors
    /// As [`Engine::load`]; [`EngineError::Argument`] on a device that reads weights in place; the hook's.
    pub fn simulate(
        path: &Path,
        options: &EngineOptions,
        kinds: &[PolicyKind],
        steps: u64,
        hook: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Simulation> {
        if !(2..=10_000).contains(&steps) {
            return Err(EngineError::argument("steps", steps, "must be 2 to 10000"));
        }
        // What is checked is what one of the policies would be loaded with.
        let options = EngineOptions { policy: kinds.first().copied(), ..options.clone() };
        let model = Arc::new(headrace_model::load(path)?.spec);
        let setup = Setup::new(&model, &options)?;
        let device = setup.device(&options)?.device;
        let model = device.arranged(&model);
        match device {
            Device::InPlace(_) => {
                Err(EngineError::argument("policy", "", "this device reads weights in place and has no residency"))
            }
            Device::Paged(provider, limit) => {
                let scenario = Home::scenario(provider, &model, &options, setup.sizes(&options, limit))?;
                simulate(&scenario, kinds, steps, hook)
            }
        }
    }
}
