//! One captured step: actions on two streams become nodes of a graph, which is replayed once a step.

use std::cell::Cell;
use std::sync::Arc;

use cudarc::driver::sys;

use crate::bounce::Fill;
use crate::clock::{COPIES_A_MARK, LANE_VARIABLE, LaneMarks};
use crate::context::Context;
use crate::driver::{CudaError, check, log_failure};
use crate::events::Event;
use crate::plan::{Action, CapturePlan, Lane};
use crate::stream::Streams;

/// A graph that can be launched.
#[derive(Debug)]
pub struct StepGraph {
    exec: sys::CUgraphExec,
    nodes: usize,
    /// Bytes by which the card's free memory shrank while it was made.
    bytes: u64,
    /// The number that was given at its last launch.
    last_used: Cell<u64>,
    /// What its replays say of their lanes. After `exec`, which writes them.
    marks: Arc<LaneMarks>,
    /// What its host functions read, at addresses that don't change. Dropped after the graph.
    fills: Vec<Vec<Fill>>,
    context: Arc<Context>,
}

// SAFETY: a graph may be launched from any thread that has its context current.
unsafe impl Send for StepGraph {}

/// Ends a capture that an error cut short, so that the stream is of use again.
struct Capture<'a> {
    streams: &'a Streams,
    open: bool,
}

impl Capture<'_> {
    fn end(&mut self) -> Result<sys::CUgraph, CudaError> {
        self.open = false;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the capture was begun on this stream by this thread.
        check(unsafe { sys::cuStreamEndCapture(self.streams.compute.raw(), &mut graph) }, "cuStreamEndCapture")?;
        Ok(graph)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.open {
            match self.end() {
                Ok(graph) if graph.is_null() => {}
                // SAFETY: the graph is ours and nothing was made of it.
                Ok(graph) => log_failure(unsafe { sys::cuGraphDestroy(graph) }, "cuGraphDestroy"),
                // The capture was broken off, as its error has said already.
                Err(error) => log::debug!("{error}"),
            }
        }
    }
}

/// Runs a plan without a graph: for programs of a few launches each, of which there are too many to keep a graph of every one.
///
/// # Errors
/// What `issue` says, or the driver.
pub fn run_directly<E: From<CudaError>>(
    context: &Arc<Context>,
    streams: &Streams,
    plan: &CapturePlan,
    mut issue: impl FnMut(&Action) -> Result<(), E>,
    finish: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    let _current = context.bind()?;
    let events = (0..plan.events).map(|_| Event::ordering(context)).collect::<Result<Vec<Event>, CudaError>>()?;
    let lane = |lane: Lane| match lane {
        Lane::Compute => &streams.compute,
        Lane::Copy => &streams.copy,
    };
    let mut finish = Some(finish);
    // The results are reported before the copy lane is joined: the host needn't wait for the link.
    let last = plan.actions.len().saturating_sub(1);
    let joined = matches!(plan.actions.last(), Some(Action::Await(Lane::Compute, _)));
    for (i, action) in plan.actions.iter().enumerate() {
        if i == last
            && joined
            && let Some(finish) = finish.take()
        {
            finish()?;
        }
        match action {
            Action::Signal(l, n) => events.get(*n).map_or(Ok(()), |event| lane(*l).record(event))?,
            Action::Await(l, n) => events.get(*n).map_or(Ok(()), |event| lane(*l).wait_for(event))?,
            Action::Launch(_) | Action::CopyIn(..) => {}
        }
        issue(action)?;
    }
    if let Some(finish) = finish.take() {
        finish()?;
    }
    Ok(())
}

impl StepGraph {
    /// Captures a plan in its order: `issue` sees every action, and launches or copies on the streams for those
    /// that aren't events.
    ///
    /// # Errors
    /// What `issue` says, or the driver.
    pub fn capture<E: From<CudaError>>(
        context: &Arc<Context>,
        streams: &Streams,
        plan: &CapturePlan,
        mut issue: impl FnMut(&Action) -> Result<(), E>,
        finish: impl FnOnce() -> Result<(), E>,
    ) -> Result<StepGraph, E> {
        let _current = context.bind()?;
        let (before, _) = context.memory_info()?;
        let events = (0..plan.events).map(|_| Event::ordering(context)).collect::<Result<Vec<Event>, CudaError>>()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives, and nothing is being captured on it.
        check(unsafe { sys::cuStreamBeginCapture_v2(streams.compute.raw(), mode) }, "cuStreamBeginCapture")?;
        let mut capture = Capture { streams, open: true };
        let lane = |lane: Lane| match lane {
            Lane::Compute => &streams.compute,
            Lane::Copy => &streams.copy,
        };
        let lanes_timed = std::env::var_os(LANE_VARIABLE).is_none_or(|value| value != "0");
        let mut marks = LaneMarks::default();
        // True between the first copy of a piece and its signal; and the marks of that piece, if it has any.
        let (mut pieces, mut in_piece, mut copying) = (0usize, false, None::<(Event, Event)>);
        let mut finish = Some(finish);
        // The results are reported before the copy lane is joined: the host needn't wait for the link.
        let last = plan.actions.len().saturating_sub(1);
        let joined = matches!(plan.actions.last(), Some(Action::Await(Lane::Compute, _)));
        for (i, action) in plan.actions.iter().enumerate() {
            if i == last
                && joined
                && let Some(finish) = finish.take()
            {
                finish()?;
            }
            match action {
                Action::Signal(l, n) => {
                    events.get(*n).map_or(Ok(()), |event| lane(*l).record(event))?;
                    in_piece &= *l != Lane::Copy;
                    if *l == Lane::Copy
                        && let Some((start, end)) = copying.take()
                    {
                        // Behind the signal, so that the reader doesn't wait for the mark.
                        streams.copy.record_in_graph(&end)?;
                        marks.copies.push((start, end));
                    }
                }
                Action::Await(Lane::Compute, n) if lanes_timed => {
                    let (start, end) = (Event::timing(context)?, Event::timing(context)?);
                    streams.compute.record_in_graph(&start)?;
                    events.get(*n).map_or(Ok(()), |event| streams.compute.wait_for(event))?;
                    streams.compute.record_in_graph(&end)?;
                    marks.waits.push((start, end));
                }
                Action::Await(l, n) => events.get(*n).map_or(Ok(()), |event| lane(*l).wait_for(event))?,
                Action::CopyIn(_, bytes) if lanes_timed => {
                    if !in_piece {
                        in_piece = true;
                        if pieces.is_multiple_of(COPIES_A_MARK) {
                            let (start, end) = (Event::timing(context)?, Event::timing(context)?);
                            streams.copy.record_in_graph(&start)?;
                            copying = Some((start, end));
                        }
                        pieces += 1;
                    }
                    marks.bytes += if copying.is_some() { *bytes } else { 0 };
                }
                Action::Launch(_) | Action::CopyIn(..) => {}
            }
            issue(action)?;
        }
        if let Some(finish) = finish.take() {
            finish()?;
        }
        let graph = capture.end()?;
        let made = StepGraph::instantiate(context, streams, graph, before, marks);
        // SAFETY: the graph is ours; what was instantiated from it doesn't need it.
        log_failure(unsafe { sys::cuGraphDestroy(graph) }, "cuGraphDestroy");
        Ok(made?)
    }

    fn instantiate(
        context: &Arc<Context>,
        streams: &Streams,
        graph: sys::CUgraph,
        before: u64,
        marks: LaneMarks,
    ) -> Result<StepGraph, CudaError> {
        let mut nodes = 0;
        // SAFETY: with a null list the call writes the number of nodes only.
        check(unsafe { sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut nodes) }, "cuGraphGetNodes")?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph is complete; the handle is destroyed in `Drop`.
        check(unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) }, "cuGraphInstantiate")?;
        let mut made = StepGraph {
            exec,
            nodes,
            bytes: 0,
            last_used: Cell::new(0),
            marks: Arc::new(marks),
            fills: Vec::new(),
            context: context.clone(),
        };
        // SAFETY: both live. Uploading now keeps the first launch short, and its memory in what is measured here.
        check(unsafe { sys::cuGraphUpload(exec, streams.compute.raw()) }, "cuGraphUpload")?;
        streams.compute.wait()?;
        made.bytes = before.saturating_sub(context.memory_info()?.0);
        Ok(made)
    }

    /// Launches the graph on the compute stream, behind everything that is queued there. `now` grows from launch to launch of
    /// all graphs.
    pub fn launch(&self, streams: &Streams, now: u64) -> Result<(), CudaError> {
        self.last_used.set(now);
        // SAFETY: the graph lives until the provider has waited for the stream.
        check(unsafe { sys::cuGraphLaunch(self.exec, streams.compute.raw()) }, "cuGraphLaunch")
    }

    /// What its replays say of their lanes.
    pub fn marks(&self) -> &Arc<LaneMarks> {
        &self.marks
    }

    /// The number given at the last launch; 0 before the first.
    pub fn last_used(&self) -> u64 {
        self.last_used.get()
    }

    /// Keeps what host functions of the graph read for as long as it lives.
    pub(crate) fn keep(&mut self, fills: Vec<Vec<Fill>>) {
        self.fills = fills;
    }

    /// Nodes.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Bytes of the card that the graph took, as the driver's free memory showed.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for StepGraph {
    fn drop(&mut self) {
        let _current = match self.context.bind() {
            Ok(current) => current,
            Err(error) => return log::error!("{error}"),
        };
        // SAFETY: made once, destroyed once; the provider fences before it drops graphs.
        log_failure(unsafe { sys::cuGraphExecDestroy(self.exec) }, "cuGraphExecDestroy");
    }
}

/// What became of graphs so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphCounters {
    /// Graphs captured.
    pub captures: u64,
    /// Graphs launched.
    pub launches: u64,
    /// Of those, graphs that compute.
    pub replays: u64,
    /// Operations launched inside a step without a graph.
    pub eager_ops: u64,
    /// Graphs dropped for another one.
    pub dropped: u64,
    /// Graphs that live.
    pub live: u64,
    /// Nodes of all graphs that live.
    pub nodes: u64,
    /// Bytes of the card that they take.
    pub bytes: u64,
}
