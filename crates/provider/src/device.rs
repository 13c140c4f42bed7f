//! What a device can do: memory ranges, recording and replaying a program.

use std::sync::Arc;

use headrace_kv::KvGeometry;
use headrace_model::ModelSpec;
use headrace_numerics::format::Format;

use crate::host::HostLedger;
use crate::program::{Segment, StepProgram};
use crate::report::{DeviceReport, LinkCeilings};
use crate::step::{StepInput, StepOutput};

/// The separate address ranges of a device. Ranges never share a granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RangeKind {
    /// Resident weights.
    Weights,
    /// The staging ring.
    Staging,
    /// KV pages: page `p` is at `p * geometry.page_bytes()`.
    Kv,
    /// Buffers of a step.
    Workspace,
}

/// What went wrong on a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device or the operating system refused memory.
    #[error("{device}: no memory for {bytes} bytes of {what}: {reason}")]
    OutOfMemory {
        /// Device.
        device: String,
        /// What the memory was for.
        what: String,
        /// Bytes asked for.
        bytes: u64,
        /// What the device said.
        reason: String,
    },
    /// A step reads something that isn't there, or an argument is out of range.
    #[error("{device}: {what}")]
    Invalid {
        /// Device.
        device: String,
        /// What is wrong.
        what: String,
    },
    /// The device failed.
    #[error("{device}: {what}")]
    Failed {
        /// Device.
        device: String,
        /// What failed.
        what: String,
    },
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `cpu`, `host-device`, `cuda:0`.
    pub name: String,
    /// For people: the processor's or the card's name.
    pub description: String,
    /// Physical mapping unit in bytes.
    pub granule: u64,
    /// Kernel family in use, such as `avx512-vnni`.
    pub kernels: String,
    /// Threads that compute; 0 where that means nothing.
    pub threads: usize,
    /// Bytes of weights that the device keeps in another layout than the file's: column-major matrices transposed, blocks of
    /// GGUF files in planes.
    pub repacked_bytes: u64,
    /// How large the pieces of weights that are placed and copied as one should be, in bytes, unless somebody asks for
    /// another size; 0 on a device that reads weights where they are.
    pub piece_bytes: u64,
}

/// Names a recorded program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProgramId(pub u64);

/// Names a step that was submitted and whose results were not collected yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(pub u64);

/// What a device without a link to host memory says when it is to measure one.
const NO_LINK: &str = "this device has no link that could be measured";

/// A device that runs step programs. The engine drives every device through this and nothing else.
pub trait Provider: Send {
    /// What it is.
    fn info(&self) -> DeviceInfo;

    /// The format in which the device wants the matrices of linear layers that a file has in `format`: the same, or the one of the
    /// same values in planes ([`headrace_model::arrange::in_planes`]). The model that [`Provider::attach`] takes has been
    /// arranged so.
    fn wanted_format(&self, format: Format) -> Format {
        format
    }

    /// Takes the model. Called once, before anything else.
    fn attach(&mut self, model: Arc<ModelSpec>, kv: KvGeometry) -> Result<(), DeviceError>;

    /// Maps physical memory so that `0 .. bytes` of the range is backed. Grows in place; a smaller value than before
    /// unmaps the tail, after a fence. Returns the bytes now mapped, a multiple of the granule. On an error nothing has
    /// changed.
    fn resize(&mut self, range: RangeKind, bytes: u64) -> Result<u64, DeviceError>;

    /// Says before anything of the range is mapped that it will hold at most `bytes` bytes: a device that takes a range whole, in one
    /// plain allocation, has to know, and one that reserves addresses reserves no more.
    fn expect_at_most(&mut self, _range: RangeKind, _bytes: u64) {}

    /// Bytes mapped in the range now, by the device's own count.
    fn mapped(&self, range: RangeKind) -> u64;

    /// Bytes of device memory that [`Provider::attach`] took and keeps: vectors, tables, whatever the device needs to run
    /// at all. 0 on a device without memory of its own.
    fn fixed_bytes(&self) -> u64;

    /// Bytes beyond [`Provider::fixed_bytes`] that recording `programs` programs of the size of `program`, all of which live at
    /// once, and running them for the first time will take of the device: activations, descriptors; not graphs. Code that
    /// the program needs is loaded here already, and part of the fixed bytes from then on. 0 on a device that needs none. The
    /// program's segments need not be mapped yet.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for a program that the device can't run.
    fn program_bytes(&mut self, _program: &StepProgram, _programs: u64) -> Result<u64, DeviceError> {
        Ok(0)
    }

    /// Names the physical memory that it takes from. Providers of one process that give the same name share it, and one limit
    /// holds for all of them; `None` for memory of its own.
    fn memory_key(&self) -> Option<String> {
        None
    }

    /// Bytes of that memory that the process takes once, however many providers share it: a context. Not part of
    /// [`Provider::fixed_bytes`], nor of the device's own count in [`Provider::report`].
    fn shared_bytes(&self) -> u64 {
        0
    }

    /// Bytes of the device that all captured graphs together may take and will never exceed: beyond
    /// [`Provider::fixed_bytes`], and charged from the beginning. 0 on a device whose programs take none.
    fn graph_allowance(&self) -> u64 {
        0
    }

    /// What the device has done and holds. Not for every step: it may ask a driver.
    fn report(&self) -> DeviceReport {
        DeviceReport::default()
    }

    /// True if the device page-locks memory of the host. Then it charges that first, once [`Provider::charge_host_memory`] has said
    /// where.
    fn locks_host_memory(&self) -> bool {
        false
    }

    /// Host memory that the device page-locks from now on is charged to `ledger` first. Said once, before a model is attached.
    fn charge_host_memory(&mut self, _ledger: Arc<dyn HostLedger>) {}

    /// Whether kernels can read host memory in place ([`crate::Place::HostMapped`]).
    ///
    /// # Errors
    /// Why they can't, in words for a user.
    fn reads_host_memory(&self) -> Result<(), String> {
        Err("this device's kernels read no host memory in place".to_string())
    }

    /// Loads what [`Provider::link_ceilings`] needs on the device: part of the fixed bytes from then on.
    ///
    /// # Errors
    /// Why the link can't be measured, in words for a user.
    fn ready_link_ceilings(&mut self) -> Result<(), String> {
        Err(NO_LINK.to_string())
    }

    /// Measures the link, once it was readied, with what is mapped of the staging range, whose contents are lost. Takes
    /// tens of milliseconds, and some pinned memory of the host for that time.
    ///
    /// # Errors
    /// Why it can't be measured, in words for a user.
    fn link_ceilings(&mut self) -> Result<LinkCeilings, String> {
        Err(NO_LINK.to_string())
    }

    /// What the device does in another way than it would, and why, a sentence each: a refused pinning, say. Empty if nothing
    /// was refused.
    fn fallbacks(&self) -> Vec<String> {
        Vec::new()
    }

    /// Backs `offset .. offset + bytes` of the range, which are multiples of the granule and not backed yet. On an error
    /// nothing has changed.
    fn map(&mut self, range: RangeKind, offset: u64, bytes: u64) -> Result<(), DeviceError>;

    /// After a fence that waits for everything that could touch them, gives the granules of `offset .. offset + bytes`
    /// back. What they held is gone. On an error they are all still backed.
    fn unmap(&mut self, range: RangeKind, offset: u64, bytes: u64) -> Result<(), DeviceError>;

    /// Copies the bytes of `segments` from the host to where they say (`Place::Resident` or `Place::Slot`), and waits.
    fn load(&mut self, segments: &[Segment]) -> Result<(), DeviceError>;

    /// Copies bytes inside a range, in order with the steps. Source and target don't overlap.
    fn copy_within(&mut self, range: RangeKind, from: u64, to: u64, bytes: u64) -> Result<(), DeviceError>;

    /// Reads mapped bytes of a range. For tests and tools, never in a step.
    fn read(&self, range: RangeKind, offset: u64, into: &mut [u8]) -> Result<(), DeviceError>;

    /// Writes mapped bytes of a range, in order with the steps.
    fn write(&mut self, range: RangeKind, offset: u64, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Records a program.
    fn record(&mut self, program: StepProgram) -> Result<ProgramId, DeviceError>;

    /// Records one of many small programs that together are a step, as a residency policy makes them. A device may make their
    /// operations one by one where it would keep a graph for a whole step's.
    ///
    /// # Errors
    /// As [`Provider::record`].
    fn record_small(&mut self, program: StepProgram) -> Result<ProgramId, DeviceError> {
        self.record(program)
    }

    /// Drops a recorded program and what it holds.
    fn discard(&mut self, id: ProgramId);

    /// Most steps that may be submitted and not collected; 1 on a device that a caller can't run ahead of. Known once a program
    /// is recorded; before that, at least 1.
    fn max_in_flight(&self) -> usize {
        1
    }

    /// Queues one step behind those that are in flight; its results are collected later. Everything else that a provider is
    /// asked for takes effect behind it as well: what unmaps or overwrites waits for it first.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for a wrong step, for more than [`Provider::max_in_flight`] of them, and behind a step whose
    /// logits are wanted and not collected; nothing is in flight that wasn't before, whatever the error.
    fn submit(&mut self, id: ProgramId, input: &StepInput) -> Result<Ticket, DeviceError>;

    /// Waits for the results of the step that was submitted first of those in flight. Later ones go on.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for any other ticket; the device's, and then the step is not in flight any more.
    fn collect(&mut self, ticket: Ticket, output: &mut StepOutput) -> Result<(), DeviceError>;

    /// Runs one step and waits for its results. Nothing else is in flight.
    ///
    /// # Errors
    /// As [`Provider::submit`] and [`Provider::collect`].
    fn run(&mut self, id: ProgramId, input: &StepInput, output: &mut StepOutput) -> Result<(), DeviceError> {
        output.tokens.clear();
        output.logits.clear();
        let ticket = self.submit(id, input)?;
        self.collect(ticket, output)
    }
}
