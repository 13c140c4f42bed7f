//! One step: descriptor, embedding rows, the graph that serves it, its results.

use std::ops::RangeInclusive;
use std::sync::atomic::{Ordering, fence};

use cudarc::driver::sys;
use headrace_model::ModelSpec;
use headrace_provider::{Buffer, DeviceError, Place, StepInput, StepOutput, Token};

use crate::abi::{ALL_FINITE, ArgmaxResult};
use crate::bind::{Addresses, Binder, Launch};
use crate::buckets::GraphKey;
use crate::descriptor::{Serial, StepLimits};
use crate::driver::{CudaError, check};
use crate::graph::{StepGraph, run_directly};
use crate::host_memory::PinnedBuffer;
use crate::host_weights::HostWeights;
use crate::launcher::How;
use crate::plan::{Action, Lane, slab};
use crate::provider::{CudaProvider, InFlight, StepParts};
use crate::recorded::Recorded;
use crate::upload::{Origin, PieceKey};

/// A failure inside a capture.
#[derive(Debug, thiserror::Error)]
enum CaptureError {
    #[error(transparent)]
    Driver(#[from] CudaError),
    #[error("{0}")]
    Other(String),
}

/// Row buckets whose kernels may start while the one before still runs. Whole steps of a 14B-shaped model on an H200: with one
/// row 5.63 ms where they may and 5.14 ms where they may not, with eight rows 8.29 and 8.58, with 32 14.1 and 13.8.
const OVERLAP_ROWS: RangeInclusive<usize> = 2..=16;

/// Reads of the flag between two looks at the stream, which says if the device failed.
const SPINS: u32 = 2048;

impl CudaProvider {
    /// Queues one step: its descriptor, and the graph that serves it, which is captured first if there is none.
    pub(crate) fn submit_step(&mut self, recorded: &mut Recorded, input: &StepInput) -> Result<Serial, DeviceError> {
        self.check_mapped(recorded)?;
        let kv = (self.arena.mapped(2), self.arena.end(2));
        let key = {
            let parts = self.parts();
            let Some(attached) = parts.attached else { return Err(parts.context.invalid("no model is attached")) };
            if recorded.plan.computes {
                let (model, weights) = (attached.model.clone(), attached.weights.clone());
                let positions = parts.prepare(recorded, input, kv)?;
                gather(recorded, input, &weights).map_err(|e| parts.context.invalid(e))?;
                recorded.key(input.rows.len(), input.wanted.len(), positions, &model)
            } else {
                GraphKey { rows: 1, wanted: 1, chunks: 0 }
            }
        };
        if !recorded.graphs.contains_key(&key) {
            let Some(model) = self.parts().attached.map(|a| a.model.clone()) else {
                return Err(self.context().invalid("no model is attached"));
            };
            let mut addresses = self.addresses(recorded, &model);
            addresses.host_mapped = self.host_mapped(recorded)?;
            if !recorded.small {
                self.room_for_graph(recorded)?;
            }
            if let Some(graph) = self.parts().capture(recorded, &model, &addresses, key)? {
                self.keep_graph(recorded, key, graph)?;
            }
        }
        let parts = self.parts();
        if let Some(graph) = recorded.graphs.get(&key) {
            parts.counters.launches += 1;
            let (stream, step) = (&parts.streams.compute, recorded.plan.computes);
            let step = step.then(|| (recorded.plan.copied_bytes, graph.marks().clone()));
            let marks = parts.clock.start(parts.context, stream).map_err(|e| parts.context.failed(e))?;
            graph.launch(parts.streams, parts.counters.launches).map_err(|e| parts.context.failed(e))?;
            parts.clock.launched(stream, marks, step).map_err(|e| parts.context.failed(e))?;
            parts.counters.replays += u64::from(recorded.plan.computes);
        }
        let serial = recorded.next();
        recorded.serial = serial.number;
        // Without a table of its own on the device, the next step's rows have to be gathered by their tokens.
        recorded.chosen = if recorded.plan.chooses && recorded.table.is_some() { input.wanted.len() } else { 0 };
        Ok(serial)
    }
}

/// Copies the embedding's rows of a step next to each other into pinned memory, where the kernel reads them.
fn gather(recorded: &mut Recorded, input: &StepInput, weights: &HostWeights) -> Result<(), String> {
    let Some(table) = recorded.plan.table.filter(|_| recorded.table.is_none()) else { return Ok(()) };
    let tensor = weights.model().tensors.get(table.0).ok_or("no embedding")?;
    let layout = recorded.host_layout;
    for (plane, &start) in layout.gathered.iter().enumerate().take(tensor.format.planes()) {
        let size = tensor.format.row_bytes(plane, tensor.cols);
        for (i, row) in input.rows.iter().enumerate() {
            let Token::Id(token) = row.token else { return Err("a row of an unknown token".to_string()) };
            let row = weights.rows(table, plane, token as usize, 1)?;
            let bytes = row.as_they_are().ok_or("an embedding that is laid out anew")?;
            let at = start as usize + i * size;
            let to = recorded.host.bytes_mut().get_mut(at..at + size).ok_or("an embedding row is too long")?;
            to.copy_from_slice(bytes);
        }
    }
    Ok(())
}

impl StepParts<'_> {
    /// Checks the step and writes its descriptor. Returns the positions that attention looks back over.
    fn prepare(&self, recorded: &mut Recorded, input: &StepInput, kv: (u64, u64)) -> Result<usize, DeviceError> {
        let Some(attached) = self.attached else { return Err(self.context.invalid("no model is attached")) };
        let page = attached.geometry.page_bytes().max(1) as u64;
        let (mapped, end) = kv;
        let limits = StepLimits {
            kv: &attached.geometry,
            pages: usize::try_from(end / page).unwrap_or(usize::MAX),
            vocab: attached.model.config.vocab,
            positions: attached.positions,
            chosen: recorded.chosen,
        };
        if mapped != end {
            // The range has holes: every page is looked up.
            for &p in input.page_tables.iter().flatten() {
                if self.arena.address(2, u64::from(p).saturating_mul(page), page).is_err() {
                    return Err(self.context.invalid(format!("page {p} is not mapped")));
                }
            }
        }
        let serial = recorded.next();
        let start = recorded.host_layout.descriptor(serial.slot as usize);
        let bytes = recorded.host.bytes_mut().get_mut(start..).unwrap_or_default();
        let filled = recorded.writer.write(input, &recorded.descriptor, limits, serial, bytes);
        let filled = filled.map_err(|e| self.context.invalid(e))?;
        let to = self.arena.base(6) + recorded.state_offset + recorded.state.descriptor;
        let from = recorded.host.as_ptr().wrapping_add(start).cast_const();
        // SAFETY: the descriptor's bytes are mapped and pinned, and aren't written again before the step's flag is seen,
        // which comes after this copy: as many steps as there are slots may be in flight. The copy comes after the step
        // before, which reads the same descriptor on the device.
        let copied = unsafe { self.streams.compute.copy_in(to, from, filled.bytes) };
        copied.map_err(|e| self.context.failed(e))?;
        Ok(filled.positions)
    }

    /// Captures the graph of a program for a key. A program of few launches is run instead, and what its host functions read is
    /// kept in it.
    fn capture(
        &mut self,
        recorded: &mut Recorded,
        model: &ModelSpec,
        addresses: &Addresses,
        key: GraphKey,
    ) -> Result<Option<StepGraph>, DeviceError> {
        let Some(attached) = self.attached else { return Err(self.context.invalid("no model is attached")) };
        let Some(uploader) = self.uploader.as_deref_mut() else {
            return Err(self.context.invalid("no model is attached"));
        };
        // Pinning and registering can't be done while a capture is open.
        let mut copies = Vec::new();
        for segment in recorded.plan.copies() {
            let Place::Slot { slot, offset } = segment.place else { continue };
            let Some(tensor) = model.tensors.get(segment.tensor.0) else { continue };
            let Some((planes, _)) = slab(tensor, segment.rows) else { continue };
            let to = addresses.staging + u64::from(slot) * recorded.program.slot_bytes + offset;
            let mut of_segment = Vec::new();
            for (plane, at) in planes.iter().enumerate().take(tensor.format.planes()) {
                let key = PieceKey { tensor: segment.tensor.0, plane, row: segment.row, rows: segment.rows };
                of_segment.push((to + at, uploader.origin(key).map_err(|e| self.context.failed(e))?));
            }
            copies.push(of_segment);
        }
        let (mut copies, mut fills) = (copies.into_iter(), Vec::new());
        let binder = Binder {
            model,
            geometry: &attached.geometry,
            at: addresses,
            width: recorded.program.activations,
            slot_bytes: recorded.program.slot_bytes,
            key,
        };
        let width = recorded.program.activations;
        let (streams, launcher) = (self.streams, self.launcher);
        let follows = std::cell::Cell::new(false);
        let mut number = 0;
        let issue = |action: &Action| -> Result<(), CaptureError> {
            let chain = recorded.chains.iter().find(|(actions, _)| key.rows == 1 && actions.contains(&number));
            number += 1;
            if let Some((actions, launch)) = chain {
                if actions.start + 1 == number {
                    let how = How { rows: 1, width, overlap: false, ask_ahead: false };
                    launcher.launch(&streams.compute, launch, how).map_err(CaptureError::Other)?;
                }
                follows.set(false);
                return Ok(());
            }
            match action {
                Action::Launch(task) => {
                    for (launch, rows) in binder.bind(task).map_err(CaptureError::Other)? {
                        let overlap = OVERLAP_ROWS.contains(&key.rows) && follows.get() && !task.reads_ring();
                        let how = How { rows, width, overlap, ask_ahead: !task.reads_host() };
                        launcher.launch(&streams.compute, &launch, how).map_err(CaptureError::Other)?;
                        follows.set(true);
                    }
                }
                Action::CopyIn(..) => {
                    for (to, origin) in copies.next().unwrap_or_default() {
                        match origin {
                            Origin::Stable(_, 0) => {}
                            // SAFETY: the slot is mapped, which is checked before every replay; the source stays where it
                            // is for as long as the uploader lives, and graphs are dropped before it.
                            Origin::Stable(from, bytes) => unsafe { streams.copy.copy_in(to, from, bytes) }?,
                            Origin::Bounced(parts) => {
                                for part in &parts {
                                    // SAFETY: as above; the graph keeps the part where it is. Loads, which use the pool too,
                                    // wait for steps, and the copies of a step are made in order.
                                    unsafe { part.capture(&streams.copy, to) }?;
                                }
                                fills.push(parts);
                            }
                        }
                    }
                }
                Action::Signal(Lane::Compute, _) | Action::Await(Lane::Compute, _) => follows.set(false),
                Action::Signal(Lane::Copy, _) | Action::Await(Lane::Copy, _) => {}
            }
            Ok(())
        };
        let finish = || -> Result<(), CaptureError> {
            if recorded.plan.computes {
                let report = Launch::Report(binder.argmax());
                let how = How { rows: key.wanted, width, overlap: false, ask_ahead: true };
                launcher.launch(&streams.compute, &report, how).map_err(CaptureError::Other)?;
            }
            Ok(())
        };
        if recorded.small {
            let done = run_directly(self.context, streams, &recorded.plan, issue, finish);
            done.map_err(|e: CaptureError| self.context.failed(e))?;
            self.counters.eager_ops += recorded.plan.tasks().count() as u64;
            recorded.fills = fills;
            return Ok(None);
        }
        let graph = StepGraph::capture(self.context, streams, &recorded.plan, issue, finish);
        let mut graph = graph.map_err(|e: CaptureError| self.context.failed(e))?;
        graph.keep(fills);
        self.counters.captures += 1;
        log::debug!("{}: captured {key:?}: {} nodes, {} bytes", self.context.name(), graph.nodes(), graph.bytes());
        Ok(Some(graph))
    }

    /// Waits for the results of a step, the first of those in flight.
    pub(crate) fn collect(
        &mut self,
        recorded: &Recorded,
        step: InFlight,
        output: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        if !recorded.plan.computes {
            return self.streams.compute.wait().map_err(|e| self.context.failed(e));
        }
        self.wait_for_flag(recorded, step.serial)?;
        if recorded.plan.chooses {
            let start = recorded.host_layout.results(step.serial.slot as usize);
            let results = recorded.host.bytes().get(start..).unwrap_or_default();
            let results = results.chunks_exact(size_of::<ArgmaxResult>()).take(step.wanted);
            output.tokens.extend(results.map(|r| match [word(r, 0), word(r, 4)] {
                [token, ALL_FINITE] => Ok(token),
                [_, bad] => Err(bad),
            }));
        }
        if step.logits {
            self.read_logits(recorded, step.wanted, output)?;
        }
        Ok(())
    }

    /// Waits for the flag that the step's last kernel writes: not for copies that the step makes for the next one.
    fn wait_for_flag(&self, recorded: &Recorded, serial: Serial) -> Result<(), DeviceError> {
        let flag = recorded.host_layout.flag(serial.slot as usize);
        let flag = recorded.host.as_ptr().wrapping_add(flag).cast::<u32>();
        let mut ended = false;
        loop {
            for _ in 0..SPINS {
                // SAFETY: the flag is an aligned word of the pinned buffer, which the device writes; a volatile read sees
                // it sooner or later.
                if unsafe { flag.read_volatile() } == serial.number {
                    // What the device wrote before the flag is visible after it.
                    fence(Ordering::Acquire);
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            if ended {
                return Err(self.context.failed("the step ended without reporting its result"));
            }
            // SAFETY: the stream lives.
            match unsafe { sys::cuStreamQuery(self.streams.compute.raw()) } {
                sys::CUresult::CUDA_ERROR_NOT_READY => {}
                // The flag was written before the stream ended; it is looked at once more.
                result => {
                    check(result, "a step").map_err(|e| self.context.failed(e))?;
                    ended = true;
                }
            }
        }
    }

    fn read_logits(&mut self, recorded: &Recorded, wanted: usize, output: &mut StepOutput) -> Result<(), DeviceError> {
        let Some(attached) = self.attached else { return Err(self.context.invalid("no model is attached")) };
        let config = &attached.model.config;
        let count = wanted * config.vocab;
        let most = recorded.program.max_wanted.max(1) * config.vocab * 4;
        let buffer = match self.logits.take() {
            Some(buffer) if buffer.len() >= most => buffer,
            _ => PinnedBuffer::new(self.context, most)
                .map_err(|e| self.context.no_memory("pinned logits", most as u64, e))?,
        };
        let buffer = self.logits.insert(buffer);
        let offset = recorded.program.buffer_offset(config, Buffer::Logits);
        let workspace = self.arena.base(3) + offset;
        // SAFETY: the logits are complete (the flag came after them) and mapped; the buffer holds them. The load stream
        // doesn't wait for the copies that the step makes for the next one.
        let copied = unsafe { self.streams.load.copy_out(buffer.as_ptr(), workspace, count * 4) };
        copied.and_then(|()| self.streams.load.wait()).map_err(|e| self.context.failed(e))?;
        let bytes = buffer.bytes().get(..count * 4).unwrap_or_default();
        output.logits.extend(bytes.chunks_exact(4).map(|b| f32::from_bits(word(b, 0))));
        Ok(())
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}
