//! Opening a card: context, streams, address ranges, kernels, and what the process takes once.

use std::collections::{HashMap, VecDeque};
use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::{CudaProvider, RANGE_COUNT};
use crate::arena::{Arena, ArenaError};
use crate::clock::Clock;
use crate::context::Context;
use crate::driver::DriverProblem;
use crate::faults::Faults;
use crate::graph::GraphCounters;
use crate::launcher::Launcher;
use crate::overhead::OverheadMeter;
use crate::physical::{Backing, CardMemory};
use crate::plain::PlainMemory;
use crate::regions::Regions;
use crate::share::{Share, Shares};
use crate::stream::Streams;

impl CudaProvider {
    /// Opens card `ordinal`: context, streams, address ranges, and the kernels that `kernels` loads. Takes no memory of ranges yet,
    /// which it takes as `backing` says. `faults` are calls of the driver that are refused on demand.
    ///
    /// # Errors
    /// [`DriverProblem`] says what the machine lacks, in words for its user.
    pub fn open_with(
        ordinal: usize,
        backing: Backing,
        kernels: impl FnOnce(&Arc<Context>) -> Result<Box<dyn Launcher>, DriverProblem>,
        faults: Faults,
    ) -> Result<CudaProvider, DriverProblem> {
        // The driver is asked first: without one, nothing else needs to be looked for.
        let driver = crate::driver::Driver::load()?;
        let usable = driver.usable_card(ordinal)?;
        if backing == Backing::Granules {
            usable.require_virtual_memory()?;
        }
        let mut shares = Shares::lock();
        let meter = OverheadMeter::before(&usable);
        let context = Context::open_with(ordinal, faults)?;
        let _current = context.bind()?;
        let (free_before, _) = context.memory_info()?;
        let streams = Streams::new(&context)?;
        let launcher = kernels(&context)?;
        let (memory, addresses) = match backing {
            // Addresses cost nothing: each range could hold the whole card.
            Backing::Granules => (CardMemory::granules(&context)?, context.card().total_bytes),
            // A range has none before it is known how large it will be.
            Backing::Plain => (CardMemory::Plain(PlainMemory::new(&context)), 0),
        };
        let granule = memory.granule();
        let arena = Arena::new(memory, granule, &[addresses; RANGE_COUNT]).map_err(|error| match error {
            ArenaError::Driver(error) => DriverProblem::Call(error),
            other => DriverProblem::Call(crate::driver::CudaError {
                call: "address ranges".into(),
                code: 0,
                text: other.to_string(),
            }),
        })?;
        let (free_at_open, _) = context.memory_info()?;
        let (share, kernel_bytes) = match shares.get(&usable.bus_id) {
            // The context was there: what came is this provider's own.
            Some(share) => (share, free_before.saturating_sub(free_at_open)),
            None => (shares.insert(&usable.bus_id, Share { overhead: meter.after(&context), free_at_open }), 0),
        };
        Ok(CudaProvider {
            programs: HashMap::new(),
            attached: None,
            uploader: None,
            logits: None,
            launcher: ManuallyDrop::new(launcher),
            arena,
            streams,
            vectors: HashMap::new(),
            rope: (0, 0),
            share,
            meter,
            kernel_bytes,
            largest_graph: 0,
            counters: GraphCounters::default(),
            clock: Clock::default(),
            link: None,
            reader: None,
            unmappings: 0,
            next_program: 0,
            in_flight: VecDeque::new(),
            next_ticket: 0,
            depth: 1,
            most_positions: usize::MAX,
            states: Regions::default(),
            slot_bytes: 0,
            whole: [0; RANGE_COUNT],
            context,
        })
    }

    /// Opens card `ordinal` with the crate's own kernels.
    ///
    /// # Errors
    /// As [`CudaProvider::open_with`].
    pub fn open(ordinal: usize) -> Result<CudaProvider, DriverProblem> {
        CudaProvider::open_refusing(ordinal, Faults::default())
    }

    /// As [`CudaProvider::open`], with plain allocations instead of granules. Runs where a card offers no virtual memory management.
    /// A range is allocated whole when its first byte is mapped, as large as [`headrace_provider::Provider::expect_at_most`] said or
    /// as is asked for then, and doesn't grow beyond that.
    ///
    /// # Errors
    /// As [`CudaProvider::open_with`].
    pub fn open_plain(ordinal: usize) -> Result<CudaProvider, DriverProblem> {
        let kernels = crate::kernel_launcher::KernelLauncher::open;
        CudaProvider::open_with(ordinal, Backing::Plain, kernels, Faults::default())
    }

    /// As [`CudaProvider::open`], with calls of the driver that are refused on demand. A test instrument.
    ///
    /// # Errors
    /// As [`CudaProvider::open_with`].
    pub fn open_refusing(ordinal: usize, faults: Faults) -> Result<CudaProvider, DriverProblem> {
        CudaProvider::open_with(ordinal, Backing::Granules, crate::kernel_launcher::KernelLauncher::open, faults)
    }
}
