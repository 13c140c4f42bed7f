//! Bytes from the host to the device at the link's speed: straight out of a registered file mapping, else through a
//! bounded pool of pinned buffers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use headrace_model::spec::TensorId;
use headrace_provider::{HostUse, Segment};

use crate::bounce::{BOUNCE_BUFFERS, BOUNCE_BYTES, BouncePool, Fill};
use crate::context::Context;
use crate::host_memory::{PinnedBuffer, Registration};
use crate::host_weights::{HostRows, HostWeights};
use crate::stream::Stream;

/// Bytes that the widest load of a kernel takes, and has to be aligned to.
const KERNEL_ALIGN: u64 = 16;

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
    /// Bytes of page-locked host memory taken through the context: registered mappings, pinned copies, the pool, buffers of steps.
    pub pinned_bytes: u64,
}

/// Where a captured copy reads from.
pub enum Origin {
    /// Host bytes that the copy engine reads at every replay.
    Stable(*const u8, usize),
    /// The driver refuses to pin them: the host copies them into the pool at every replay.
    Bounced(Vec<Fill>),
}

/// The ways from the host to the device.
pub struct Uploader {
    context: Arc<Context>,
    weights: Arc<HostWeights>,
    /// By file; `None` where the driver refused.
    files: HashMap<usize, Option<Registration>>,
    /// Pinned copies of rows whose file couldn't be registered.
    pinned: HashMap<PieceKey, PinnedBuffer>,
    pool: BouncePool,
    /// Why the driver wouldn't pin weights, once it wouldn't.
    refused_pins: Option<String>,
    /// Copies that aren't pinned of rows that are laid out anew, where pinning is refused.
    plain: HashMap<PieceKey, Vec<u8>>,
    /// Bytes of rows that captured copies read through the pool.
    unpinned: HashMap<PieceKey, u64>,
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
            pool: BouncePool::default(),
            refused_pins: None,
            plain: HashMap::new(),
            unpinned: HashMap::new(),
            counters: UploadCounters::default(),
            said_gathered: false,
            refusals: Vec::new(),
        }
    }

    /// The counters.
    pub fn counters(&self) -> UploadCounters {
        UploadCounters { pinned_bytes: self.context.host().bytes(), ..self.counters }
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
                Registration::new(&self.context, model, file).map_err(|e| format!("{}: {e}", f.path.display()))
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
        let rows = weights.rows(TensorId(key.tensor), key.plane, key.row, key.rows)?;
        if rows.len == 0 {
            return Ok(());
        }
        if let Some(bytes) = rows.as_they_are()
            && rows.file.is_some_and(|file| self.registered(file))
        {
            // SAFETY: the bytes are in a registered mapping that outlives the copy; the caller has checked the target.
            unsafe { stream.copy_in(to, bytes.as_ptr(), bytes.len()) }.map_err(|e| e.to_string())?;
            self.counters.registered_bytes += bytes.len() as u64;
            return Ok(());
        }
        if let Some(copy) = self.pinned.get(&key) {
            // Rows that were laid out already.
            // SAFETY: the copy stays as long as the uploader, which waits for its streams; the caller has checked the target.
            unsafe { stream.copy_in(to, copy.as_ptr(), rows.len) }.map_err(|e| e.to_string())?;
            return Ok(());
        }
        self.pool.copy(&self.context, stream, &rows, to)?;
        self.counters.bounced_bytes += rows.len as u64;
        Ok(())
    }

    /// The planes of a table as device addresses that kernels may read rows of; `None` where its file can't be registered, or
    /// holds it in another order or at addresses that the kernels can't read. Says so once.
    pub fn mapped(&mut self, table: TensorId) -> Option<[u64; 3]> {
        let weights = self.weights.clone();
        let tensor = weights.model().tensors.get(table.0)?;
        let mut planes = [0; 3];
        for (plane, address) in planes.iter_mut().enumerate().take(tensor.format.planes()) {
            let rows = weights.rows(table, plane, 0, tensor.rows).ok()?;
            let (bytes, file) = (rows.as_they_are()?, rows.file);
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

    /// Where a captured copy may read some rows at every replay: in a registered mapping, else in a pinned copy that is made
    /// here; where that is refused, through the pool. It stays so for as long as the uploader lives.
    ///
    /// # Errors
    /// If not even the pool can be pinned.
    pub fn origin(&mut self, key: PieceKey) -> Result<Origin, String> {
        let weights = self.weights.clone();
        let rows = weights.rows(TensorId(key.tensor), key.plane, key.row, key.rows)?;
        if let Some(bytes) = rows.as_they_are()
            && (bytes.is_empty() || rows.file.is_some_and(|file| self.registered(file)))
        {
            return Ok(Origin::Stable(bytes.as_ptr(), bytes.len()));
        }
        if self.refused_pins.is_none() || self.pinned.contains_key(&key) {
            match self.pin(key, &rows) {
                Ok(buffer) => return Ok(Origin::Stable(buffer.as_ptr().cast_const(), rows.len)),
                Err(error) => {
                    log::warn!(
                        "{error}; what isn't pinned is streamed through {BOUNCE_BUFFERS} buffers of {BOUNCE_BYTES} bytes"
                    );
                    self.refused_pins = Some(error);
                }
            }
        }
        self.pool.take(&self.context).map_err(|e| e.to_string())?;
        self.unpinned.insert(key, rows.len as u64);
        let bytes = match rows.as_they_are() {
            Some(bytes) => bytes,
            // What the host copies at every replay has to be there in the device's layout.
            None => {
                let made = match self.plain.remove(&key) {
                    Some(bytes) => bytes,
                    None => {
                        let mut bytes = vec![0; rows.len];
                        rows.write(0, &mut bytes)?;
                        bytes
                    }
                };
                self.plain.entry(key).or_insert(made)
            }
        };
        Ok(Origin::Bounced(self.pool.fills(bytes)))
    }

    /// The planes of a segment as device addresses at which kernels read it in place: in a registered mapping where that lies
    /// as kernels need it, else in a pinned copy that is made here.
    ///
    /// # Errors
    /// If neither can be had.
    pub fn in_place(&mut self, segment: &Segment) -> Result<[u64; 3], String> {
        let weights = self.weights.clone();
        let tensor = weights.model().tensors.get(segment.tensor.0).ok_or("no such tensor")?;
        let mut planes = [0; 3];
        for (plane, address) in planes.iter_mut().enumerate().take(tensor.format.planes()) {
            let rows = weights.rows(segment.tensor, plane, segment.row, segment.rows)?;
            if rows.len == 0 {
                continue;
            }
            let registered = rows.file.filter(|&file| self.registered(file));
            let known = registered.and_then(|file| self.files.get(&file)).and_then(Option::as_ref);
            let there = known.zip(rows.as_they_are()).map(|(r, bytes)| r.device(bytes));
            *address = match there.filter(|a| a.is_multiple_of(KERNEL_ALIGN)) {
                Some(at) => at,
                None => {
                    let key = PieceKey { tensor: segment.tensor.0, plane, row: segment.row, rows: segment.rows };
                    let pinned = self.pin(key, &rows).map(|buffer| buffer.device());
                    pinned.map_err(|e| format!("{}: can't be read in place: {e}", tensor.name))?
                }
            };
        }
        Ok(planes)
    }

    /// The pinned copy of some rows, made where there is none.
    fn pin(&mut self, key: PieceKey, rows: &HostRows<'_>) -> Result<&PinnedBuffer, String> {
        match self.pinned.entry(key) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(vacant) => {
                let mut buffer =
                    PinnedBuffer::for_use(&self.context, rows.len, HostUse::Copy).map_err(|e| e.to_string())?;
                rows.write(0, &mut buffer.bytes_mut()[..rows.len])?;
                self.counters.pinned_copy_bytes += rows.len as u64;
                Ok(vacant.insert(buffer))
            }
        }
    }

    /// What is done in another way than it would be, and why, a sentence each.
    pub fn fallbacks(&self) -> Vec<String> {
        let mut said: Vec<String> = Vec::new();
        let copied = self.counters.pinned_copy_bytes;
        said.extend(self.refusals.iter().map(|reason| format!("not registered: {reason}")));
        if copied > 0 {
            said.push(format!(
                "{copied} bytes of weights have a pinned copy, because the device doesn't read them from their file in place"
            ));
        }
        if let Some(reason) = &self.refused_pins {
            let bytes: u64 = self.unpinned.values().sum();
            let pool = self.pool.pinned_bytes();
            said.push(format!("{bytes} bytes of weights are streamed through a pool of {pool} pinned bytes: {reason}"));
        }
        said
    }
}

#[cfg(test)]
#[path = "upload_tests.rs"]
mod tests;
