//! Bytes from the host to the device at the link's speed: straight out of a registered file mapping, else through a
//! bounded pool of pinned buffers.

use std::collections::HashMap;
use std::sync::Arc;

use headrace_model::spec::TensorId;

use crate::context::Context;
use crate::driver::CudaError;
use crate::events::Event;
use crate::host_memory::{PinnedBuffer, Registration};
use crate::host_weights::HostWeights;
use crate::stream::Stream;

/// Bytes of one pinned buffer of the pool.
pub const BOUNCE_BYTES: usize = 32 << 20;

/// Bytes that the widest load of a kernel takes, and has to be aligned to.
const KERNEL_ALIGN: u64 = 16;

/// Buffers of the pool: one is filled while the other is copied.
const BOUNCE_BUFFERS: usize = 2;

/// What was copied, and in which way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UploadCounters {
    /// Bytes copied straight from registered file mappings.
    pub registered_bytes: u64,
    /// Bytes copied through the pinned pool.
    pub bounced_bytes: u64,
    /// Bytes of pinned copies that streaming reads from, because their file couldn't be registered.
    pub pinned_copy_bytes: u64,
    /// Files that couldn't be registered.
    pub refused_registrations: u64,
    /// Bytes of pinned host memory taken.
    pub pinned_bytes: u64,
}

struct Bounce {
    buffer: PinnedBuffer,
    copied: Event,
    busy: bool,
}

/// The ways from the host to the device.
pub struct Uploader {
    context: Arc<Context>,
    weights: Arc<HostWeights>,
    /// By file; `None` where the driver refused.
    files: HashMap<usize, Option<Registration>>,
    /// Pinned copies of rows whose file couldn't be registered.
    pinned: HashMap<PieceKey, PinnedBuffer>,
    bounce: Vec<Bounce>,
    next: usize,
    counters: UploadCounters,
    /// True once it was logged that the host gathers embedding rows.
    said_gathered: bool,
    /// Why files couldn't be registered, or rows not be read in place.
    refusals: Vec<String>,
}

/// A run of rows of one plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PieceKey {
    /// Tensor.
    pub tensor: usize,
    /// Plane.
    pub plane: usize,
    /// First row.
    pub row: usize,
    /// Number of rows.
    pub rows: usize,
}

impl Uploader {
    /// Takes no memory yet.
    pub fn new(context: &Arc<Context>, weights: Arc<HostWeights>) -> Uploader {
        Uploader {
            context: context.clone(),
            weights,
            files: HashMap::new(),
            pinned: HashMap::new(),
            bounce: Vec::new(),
            next: 0,
            counters: UploadCounters::default(),
            said_gathered: false,
            refusals: Vec::new(),
        }
    }

    /// The counters.
    pub fn counters(&self) -> UploadCounters {
        self.counters
    }

    /// Why files couldn't be registered, one entry a file, and the embedding not be read in place.
    pub fn refusals(&self) -> &[String] {
        &self.refusals
    }

    /// True if the copy engine can read the mapping of `file`. Registers it the first time.
    fn registered(&mut self, file: usize) -> bool {
        if let Some(known) = self.files.get(&file) {
            return known.is_some();
        }
        let model = self.weights.model();
        let registration = match model.files.get(file) {
            Some(f) if f.mapped && self.context.card().read_only_registration => {
                // SAFETY: the mapping belongs to the model, which `weights` keeps; `Drop` ends registrations first.
                unsafe { Registration::new(&self.context, &f.bytes) }.map_err(|e| format!("{}: {e}", f.path.display()))
            }
            Some(f) if f.mapped => Err(format!("{}: the card can't register read-only mappings", f.path.display())),
            Some(f) => Err(format!("{}: not a mapping", f.path.display())),
            None => Err(format!("file {file} of the model isn't there")),
        };
        let registration = registration.inspect_err(|reason| {
            log::warn!(
                "{reason}; its bytes go through {BOUNCE_BUFFERS} pinned buffers, and pinned copies where streamed"
            );
            self.counters.refused_registrations += 1;
            self.refusals.push(reason.clone());
        });
        let registration = registration.ok();
        let known = registration.is_some();
        self.files.insert(file, registration);
        known
    }

    /// Queues a copy of some rows of a plane to `to` on `stream`. The caller waits for the stream before it reads them.
    pub fn upload(&mut self, stream: &Stream, key: PieceKey, to: u64) -> Result<(), String> {
        let weights = self.weights.clone();
        let id = TensorId(key.tensor);
        let (bytes, file) = weights.rows(id, key.plane, key.row, key.rows)?;
        if bytes.is_empty() {
            return Ok(());
        }
        if file.is_some_and(|file| self.registered(file)) {
            // SAFETY: the bytes are in a registered mapping that outlives the copy; the caller has checked the target.
            unsafe { stream.copy_in(to, bytes.as_ptr(), bytes.len()) }.map_err(|e| e.to_string())?;
            self.counters.registered_bytes += bytes.len() as u64;
            return Ok(());
        }
        self.bounce(stream, bytes, to)
    }

    /// Queues a copy of any host bytes through the pinned pool.
    pub fn bounce(&mut self, stream: &Stream, bytes: &[u8], to: u64) -> Result<(), String> {
        let text = |error: CudaError| error.to_string();
        while self.bounce.len() < BOUNCE_BUFFERS {
            let buffer = PinnedBuffer::new(&self.context, BOUNCE_BYTES).map_err(text)?;
            let copied = Event::ordering(&self.context).map_err(text)?;
            self.counters.pinned_bytes += BOUNCE_BYTES as u64;
            self.bounce.push(Bounce { buffer, copied, busy: false });
        }
        for (i, part) in bytes.chunks(BOUNCE_BYTES).enumerate() {
            let next = self.next;
            self.next = (next + 1) % BOUNCE_BUFFERS;
            let Some(slot) = self.bounce.get_mut(next) else { return Err("no pinned buffer".into()) };
            if slot.busy {
                slot.copied.wait().map_err(text)?;
            }
            slot.buffer.bytes_mut()[..part.len()].copy_from_slice(part);
            // SAFETY: the buffer isn't written again before `copied` has happened; the caller has checked the target.
            unsafe { stream.copy_in(to + (i * BOUNCE_BYTES) as u64, slot.buffer.as_ptr(), part.len()) }
                .map_err(text)?;
            stream.record(&slot.copied).map_err(text)?;
            slot.busy = true;
            self.counters.bounced_bytes += part.len() as u64;
        }
        Ok(())
    }

    /// The planes of a table as device addresses that kernels may read rows of; `None` where its file can't be registered, or
    /// holds it in another order or at addresses that the kernels can't read. Says so once.
    pub fn mapped(&mut self, table: TensorId) -> Option<[u64; 3]> {
        let weights = self.weights.clone();
        let tensor = weights.model().tensors.get(table.0)?;
        let mut planes = [0; 3];
        for (plane, address) in planes.iter_mut().enumerate().take(tensor.format.planes()) {
            let (bytes, file) = weights.rows(table, plane, 0, tensor.rows).ok()?;
            if bytes.is_empty() {
                continue;
            }
            let registered = file.is_some_and(|file| self.registered(file));
            let known = file.filter(|_| registered).and_then(|file| self.files.get(&file)).and_then(Option::as_ref);
            match known.map(|r| r.device(bytes)).filter(|a| a.is_multiple_of(KERNEL_ALIGN)) {
                Some(at) => *address = at,
                None => {
                    if !std::mem::replace(&mut self.said_gathered, true) {
                        let why = "the card can't read its rows in place, so one step is in flight at a time";
                        self.refusals.push(format!("{}: {why}", tensor.name));
                        log::warn!("{}: {why}", tensor.name);
                    }
                    return None;
                }
            }
        }
        Some(planes)
    }

    /// Host bytes that a captured copy may read at every replay: in a registered mapping, else in a pinned copy that is
    /// made here. They stay where they are for as long as the uploader lives.
    pub fn stable(&mut self, key: PieceKey) -> Result<(*const u8, usize), String> {
        let weights = self.weights.clone();
        let id = TensorId(key.tensor);
        let (bytes, file) = weights.rows(id, key.plane, key.row, key.rows)?;
        if file.is_some_and(|file| self.registered(file)) {
            return Ok((bytes.as_ptr(), bytes.len()));
        }
        if let Some(buffer) = self.pinned.get(&key) {
            return Ok((buffer.as_ptr(), bytes.len()));
        }
        let mut buffer = PinnedBuffer::new(&self.context, bytes.len()).map_err(|e| e.to_string())?;
        buffer.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        self.counters.pinned_copy_bytes += bytes.len() as u64;
        self.counters.pinned_bytes += bytes.len() as u64;
        let from = buffer.as_ptr().cast_const();
        self.pinned.insert(key, buffer);
        Ok((from, bytes.len()))
    }
}
