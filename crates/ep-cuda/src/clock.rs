//! The device's own clock: events around every launched graph, and inside graphs around what each lane waits for.
//!
//! A step's time needs two events of its own, so that steps in flight don't share any. What copies and kernels were busy for
//! is marked by event nodes inside the captured graph, which every replay writes anew; they are read when nothing is in
//! flight, so for a sample of the steps.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use headrace_provider::ClockReport;

use crate::context::Context;
use crate::driver::CudaError;
use crate::events::Event;
use crate::stream::Stream;

/// Set to `0` to leave the marks of copies and waits out of captured graphs.
pub const LANE_VARIABLE: &str = "HEADRACE_LANE_CLOCK";

/// Steps between two samples, so that reading the marks of hundreds of copies is no part of a run's time.
const SAMPLE_EVERY: u64 = 8;

/// Of so many pieces copied, one is marked: every mark takes the copy lane microseconds, and a step copies hundreds of pieces.
pub const COPIES_A_MARK: usize = 8;

/// Pairs of timing events inside one graph.
#[derive(Debug, Default)]
pub struct LaneMarks {
    /// Around the copies of one piece in [`COPIES_A_MARK`].
    pub copies: Vec<(Event, Event)>,
    /// Bytes of these pieces.
    pub bytes: u64,
    /// Around each wait of the compute lane.
    pub waits: Vec<(Event, Event)>,
}

impl LaneMarks {
    fn sum(pairs: &[(Event, Event)]) -> Result<f64, CudaError> {
        pairs.iter().try_fold(0.0, |sum, (start, end)| Ok(sum + end.seconds_since(start)?))
    }
}

/// A launch whose end hasn't been seen.
#[derive(Debug)]
struct Pending {
    start: Event,
    end: Event,
    /// `None` for a run of copies that computes nothing.
    step: Option<Launched>,
}

/// What is known of a launched step.
#[derive(Clone, Debug)]
struct Launched {
    copied_bytes: u64,
    marks: Arc<LaneMarks>,
    number: u64,
}

#[derive(Debug, Default)]
struct State {
    pending: VecDeque<Pending>,
    spare: Vec<(Event, Event)>,
    /// The last step that has ended, with its seconds, until its marks were read.
    last: Option<(Launched, f64)>,
    /// Number of the step sampled last.
    sampled: u64,
    launched: u64,
    report: ClockReport,
}

/// The clock of one device.
#[derive(Debug, Default)]
pub struct Clock {
    state: RefCell<State>,
}

impl Clock {
    /// Marks the start of what is launched next. Give what it returns to [`Clock::launched`].
    pub fn start(&self, context: &Arc<Context>, stream: &Stream) -> Result<(Event, Event), CudaError> {
        let mut state = self.state.borrow_mut();
        state.settle(false);
        let (start, end) = match state.spare.pop() {
            Some(pair) => pair,
            None => (Event::timing(context)?, Event::timing(context)?),
        };
        stream.record(&start)?;
        Ok((start, end))
    }

    /// Marks the end of what was launched: a step with its marks and the bytes that it copies, or a run of copies.
    pub fn launched(
        &self,
        stream: &Stream,
        (start, end): (Event, Event),
        step: Option<(u64, Arc<LaneMarks>)>,
    ) -> Result<(), CudaError> {
        stream.record(&end)?;
        let mut state = self.state.borrow_mut();
        state.launched += u64::from(step.is_some());
        let number = state.launched;
        let step = step.map(|(copied_bytes, marks)| Launched { copied_bytes, marks, number });
        state.pending.push_back(Pending { start, end, step });
        Ok(())
    }

    /// Sums since the device was made.
    pub fn report(&self) -> ClockReport {
        let mut state = self.state.borrow_mut();
        state.settle(true);
        state.report.clone()
    }
}

impl State {
    /// Takes up what has ended. With nothing in flight, reads the marks of the last step if it is time, or `now`.
    fn settle(&mut self, now: bool) {
        while self.pending.front().is_some_and(|p| p.end.has_happened()) {
            let Some(Pending { start, end, step }) = self.pending.pop_front() else { break };
            if let (Some(step), Ok(seconds)) = (step, end.seconds_since(&start)) {
                self.report.steps += 1;
                self.report.step_seconds += seconds;
                self.report.copied_bytes += step.copied_bytes;
                self.last = Some((step, seconds));
            }
            self.spare.push((start, end));
        }
        let due = |number: u64| now || self.sampled == 0 || number >= self.sampled + SAMPLE_EVERY;
        // A replay in flight may be writing the same marks.
        if !self.pending.is_empty() || !self.last.as_ref().is_some_and(|(step, _)| due(step.number)) {
            return;
        }
        let Some((step, seconds)) = self.last.take() else { return };
        let sums = LaneMarks::sum(&step.marks.copies).and_then(|c| Ok((c, LaneMarks::sum(&step.marks.waits)?)));
        // By bytes: pieces differ in size, and every eighth may be one of the smaller ones.
        let scale = step.copied_bytes as f64 / step.marks.bytes.max(1) as f64;
        match sums {
            // A step that copies and has no marks says nothing of its lanes.
            Ok(_) if step.copied_bytes > 0 && step.marks.copies.is_empty() => {}
            Ok((copies, waits)) => {
                self.sampled = step.number;
                let report = &mut self.report;
                report.sampled_steps += 1;
                report.sampled_seconds += seconds;
                report.sampled_bytes += step.copied_bytes;
                report.copy_seconds += copies * scale;
                report.compute_seconds += (seconds - waits).max(0.0);
            }
            Err(error) => log::debug!("the marks of a step can't be read: {error}"),
        }
    }
}
