//! The copy engine: a thread of its own that fills the slots of the staging ring, in order, as they become free.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use headrace_provider::{Instr, Place, Segment, StepProgram};

use super::fault::{DeviceProbe, FaultPoint};
use super::source::slab;
use crate::memory::POISON;
use crate::weights::{FileWeights, WeightSource};

/// Jobs that may wait without an allocation. A step starts one, and the one before is nearly done by then.
const QUEUE: usize = 16;

/// One copy: what goes into which slot, and when it may begin.
struct CopyCommand {
    slot: usize,
    segments: Vec<Segment>,
    /// Frees of the slot that must have happened, counted from the start of the program.
    frees: u64,
    bytes: u64,
}

/// The copies of a program in order.
pub struct CopyList {
    copies: Vec<CopyCommand>,
    /// Frees of each slot in the whole program.
    frees: Vec<u64>,
    /// Copies into each slot in the whole program.
    pub counts: Vec<u64>,
}

impl CopyList {
    /// The copies of `program`, whose slots are all within its ring.
    pub fn new(program: &StepProgram, bytes: impl Fn(&Segment) -> u64) -> CopyList {
        let slots = program.slots as usize;
        let mut list = CopyList { copies: Vec::new(), frees: vec![0; slots], counts: vec![0; slots] };
        for instr in &program.instrs {
            match instr {
                Instr::Copy { segments, slot } => {
                    let slot = *slot as usize;
                    let bytes = segments.iter().map(&bytes).sum();
                    let command = CopyCommand { slot, segments: segments.clone(), frees: list.frees[slot], bytes };
                    list.copies.push(command);
                    list.counts[slot] += 1;
                }
                Instr::Free { slot } => list.frees[*slot as usize] += 1,
                Instr::Op(_) | Instr::WaitCopy { .. } => {}
            }
        }
        list
    }

    /// Bytes of weights that the program copies.
    pub fn bytes(&self) -> u64 {
        self.copies.iter().map(|c| c.bytes).sum()
    }

    /// True if there is nothing to copy.
    pub fn is_empty(&self) -> bool {
        self.copies.is_empty() && self.frees.iter().all(|&f| f == 0)
    }
}

#[derive(Default)]
struct Events {
    copied: AtomicU64,
    freed: AtomicU64,
}

/// The events of one ring. After a failure a ring is not used again; a new one takes its place.
pub struct Ring {
    /// Bytes of a slot.
    pub slot_bytes: u64,
    events: Vec<Events>,
    /// Frees of each slot by the programs whose copies are done; the copy thread's own.
    base: Mutex<Vec<u64>>,
    stopped: AtomicBool,
    failure: Mutex<Option<String>>,
}

impl Ring {
    /// A ring in which nothing was ever copied.
    pub fn new(slots: u32, slot_bytes: u64) -> Ring {
        Ring {
            slot_bytes,
            events: (0..slots).map(|_| Events::default()).collect(),
            base: Mutex::new(vec![0; slots as usize]),
            stopped: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.events.len() as u32
    }

    /// Copies into a slot that are done.
    pub fn copied(&self, slot: u32) -> u64 {
        // Acquire: what the copy wrote is seen by whoever sees its event.
        self.events.get(slot as usize).map_or(0, |e| e.copied.load(Ordering::Acquire))
    }

    /// True if no further copy will be made.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Why a copy failed, if one did.
    pub fn failure(&self) -> Option<String> {
        if self.is_stopped() { lock(&self.failure).clone() } else { None }
    }

    fn fail(&self, what: String) {
        lock(&self.failure).get_or_insert(what);
        self.stopped.store(true, Ordering::Release);
    }
}

/// Where slots are: the staging range, which never moves.
#[derive(Clone, Copy)]
pub struct Staging(pub NonNull<u8>);

// SAFETY: the copy thread writes slots only between their events; the range outlives the thread, and is unmapped only
// behind a fence.
unsafe impl Send for Staging {}

/// Copies to be made.
pub struct Job {
    /// Which.
    pub list: Arc<CopyList>,
    /// Into the slots of which ring.
    pub ring: Arc<Ring>,
    /// From where.
    pub source: Arc<FileWeights>,
    /// To where.
    pub staging: Staging,
}

struct Queue {
    jobs: VecDeque<Job>,
    busy: bool,
    closed: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    closing: AtomicBool,
    probe: DeviceProbe,
    poison: bool,
    link: Option<u64>,
}

/// The copy thread. Dropping it waits until the thread is gone.
pub struct Copier {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds one of these locks can leave its contents half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Copier {
    /// Starts the thread. `poison`: slots are poisoned before a copy; `link`: bytes per second, or as fast as memory is.
    pub fn new(probe: DeviceProbe, poison: bool, link: Option<u64>) -> std::io::Result<Copier> {
        let queue = Queue { jobs: VecDeque::with_capacity(QUEUE), busy: false, closed: false };
        let shared = Arc::new(Shared {
            queue: Mutex::new(queue),
            changed: Condvar::new(),
            closing: AtomicBool::new(false),
            probe,
            poison,
            link,
        });
        let own = shared.clone();
        let thread = std::thread::Builder::new().name("headrace-copy".to_string()).spawn(move || own.serve())?;
        Ok(Copier { shared, thread: Some(thread) })
    }

    /// Starts a program's copies, behind those that were started before.
    pub fn start(&self, job: Job) {
        lock(&self.shared.queue).jobs.push_back(job);
        self.shared.changed.notify_all();
    }

    /// Records that everything so far has read `slot` for the last time.
    pub fn free(&self, ring: &Ring, slot: u32) {
        if let Some(events) = ring.events.get(slot as usize) {
            // Release: the readers are done before the copy thread sees it.
            events.freed.fetch_add(1, Ordering::Release);
        }
        self.handle().inspect(|t| t.unpark());
    }

    /// Waits until every copy that was started is done.
    pub fn fence(&self) {
        self.shared.probe.fenced();
        let mut queue = lock(&self.shared.queue);
        while queue.busy || !queue.jobs.is_empty() {
            queue = self.shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Drops the copies of `ring` that haven't begun, and waits for the one that has.
    pub fn abandon(&self, ring: &Ring) {
        ring.stopped.store(true, Ordering::Release);
        self.handle().inspect(|t| t.unpark());
        self.fence();
    }

    fn handle(&self) -> Option<&Thread> {
        self.thread.as_ref().map(JoinHandle::thread)
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        lock(&self.shared.queue).closed = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                log::error!("the copy thread panicked");
            }
        }
    }
}

impl Shared {
    fn serve(&self) {
        let mut queue = lock(&self.queue);
        loop {
            queue.busy = false;
            if queue.closed {
                queue.jobs.clear();
                self.changed.notify_all();
                return;
            }
            let Some(job) = queue.jobs.pop_front() else {
                self.changed.notify_all();
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            queue.busy = true;
            drop(queue);
            if !job.ring.is_stopped() {
                let failure = match catch_unwind(AssertUnwindSafe(|| self.copy_all(&job))) {
                    Ok(Ok(())) => None,
                    Ok(Err(what)) => Some(what),
                    Err(payload) => Some(format!("the copy thread panicked: {}", panic_text(payload.as_ref()))),
                };
                if let Some(what) = failure {
                    job.ring.fail(what);
                }
            }
            // Before the fence lets anybody go: a job holds the model.
            drop(job);
            queue = lock(&self.queue);
        }
    }

    fn copy_all(&self, job: &Job) -> Result<(), String> {
        let mut base = lock(&job.ring.base);
        for (i, copy) in job.list.copies.iter().enumerate() {
            let events =
                job.ring.events.get(copy.slot).ok_or_else(|| format!("slot {} is not in the ring", copy.slot))?;
            let freed = base.get(copy.slot).copied().unwrap_or(0) + copy.frees;
            // Acquire: the readers of what the slot held are done.
            while events.freed.load(Ordering::Acquire) < freed {
                if job.ring.is_stopped() || self.closing.load(Ordering::Acquire) {
                    return Ok(());
                }
                std::thread::park_timeout(Duration::from_millis(1));
            }
            if job.ring.is_stopped() || self.closing.load(Ordering::Acquire) {
                return Ok(());
            }
            if self.probe.strikes(FaultPoint::Copy) {
                return Err(format!("copy {i} into slot {}: a fault that was asked for", copy.slot));
            }
            let start = Instant::now();
            self.copy(job, copy).map_err(|e| format!("copy {i} into slot {}: {e}", copy.slot))?;
            self.probe.copied(copy.bytes, start.elapsed());
            events.copied.fetch_add(1, Ordering::Release);
        }
        for (base, frees) in base.iter_mut().zip(&job.list.frees) {
            *base += frees;
        }
        Ok(())
    }

    fn copy(&self, job: &Job, copy: &CopyCommand) -> Result<(), String> {
        let slot_bytes = job.ring.slot_bytes as usize;
        // SAFETY: `run` saw that every slot of the ring is mapped, and unmapping waits for this thread. Nobody reads the
        // slot: its last reader's event has come, and the next one waits for this copy's.
        let slot = unsafe { job.staging.0.add(copy.slot * slot_bytes) };
        if self.poison {
            // SAFETY: as above.
            unsafe { slot.write_bytes(POISON, slot_bytes) };
        }
        if let Some(link) = self.link {
            std::thread::sleep(Duration::from_secs_f64(copy.bytes as f64 / link.max(1) as f64));
        }
        for segment in &copy.segments {
            let Place::Slot { offset, .. } = segment.place else { return Err("a copy to somewhere else".to_string()) };
            let view = job.source.segment(&Segment { place: Place::File, ..*segment })?;
            for (plane, at) in view.planes.iter().zip(slab(&view, offset)) {
                if at.end > job.ring.slot_bytes {
                    return Err(format!("bytes {at:?} of a slot of {slot_bytes}"));
                }
                // SAFETY: within the slot, which is this thread's alone as above; the source is the model's own memory.
                unsafe {
                    slot.add(at.start as usize).copy_from_nonoverlapping(NonNull::from(*plane).cast(), plane.len())
                };
            }
        }
        Ok(())
    }
}

fn panic_text(payload: &(dyn std::any::Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
