//! From a step program to its capture plan, checked against the model: every segment read where it is by then, every slot filled and
//! freed in turn.

use headrace_model::ModelSpec;
use headrace_model::spec::{Tensor, TensorId};
use headrace_provider::program::PLANE_ALIGN;
use headrace_provider::{Buffer, Instr, Op, Place, RowSet, Segment, StepProgram, check};

use super::{Action, ActivationTask, CapturePlan, Lane, LinearTask, Part, Source, Task, slab};

/// What a slot of the ring holds while the program is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotState {
    /// What the replay before left there.
    Before,
    /// A copy is on its way; the event says when it is there.
    Copying(usize),
    /// It may be read.
    Readable,
    /// Nothing reads it any more; the event says so.
    Free(usize),
}

struct Planner<'a> {
    model: &'a ModelSpec,
    program: &'a StepProgram,
    plan: CapturePlan,
    slots: Vec<SlotState>,
    /// Action that makes the current activation.
    current: Option<(usize, ActivationTask)>,
}

/// Checks `program` against the model. The error names the instruction and says what is wrong with it.
pub fn plan(program: &StepProgram, model: &ModelSpec) -> Result<CapturePlan, String> {
    check(program, model)?;
    if u32::try_from(program.max_rows).is_err() {
        return Err(format!("a program for {} rows", program.max_rows));
    }
    let plan = CapturePlan {
        actions: Vec::new(),
        events: 0,
        chooses: false,
        computes: false,
        codes_width: 0,
        floats_width: 0,
        table: None,
        copied_bytes: 0,
    };
    let slots = vec![SlotState::Before; program.slots as usize];
    let mut p = Planner { model, program, plan, slots, current: None };
    let copies = program.instrs.iter().any(|i| matches!(i, Instr::Copy { .. }));
    if copies {
        // The copy lane joins the capture here and leaves it at the end: a replay starts after the one before has ended.
        let fork = p.event();
        p.plan.actions.extend([Action::Signal(Lane::Compute, fork), Action::Await(Lane::Copy, fork)]);
    }
    for (i, instr) in program.instrs.iter().enumerate() {
        p.instr(instr).map_err(|what| format!("instruction {i}: {what}"))?;
    }
    if copies {
        let join = p.event();
        p.plan.actions.extend([Action::Signal(Lane::Copy, join), Action::Await(Lane::Compute, join)]);
    }
    Ok(p.plan)
}

impl Planner<'_> {
    fn event(&mut self) -> usize {
        self.plan.events += 1;
        self.plan.events - 1
    }

    fn launch(&mut self, task: Task) {
        self.plan.computes = true;
        self.plan.actions.push(Action::Launch(task));
    }

    fn slot(&mut self, slot: u32) -> Result<&mut SlotState, String> {
        let count = self.slots.len();
        self.slots.get_mut(slot as usize).ok_or_else(|| format!("slot {slot} of {count}"))
    }

    fn instr(&mut self, instr: &Instr) -> Result<(), String> {
        match instr {
            Instr::Op(op) => self.op(op),
            Instr::Copy { segments, slot } => self.copy(segments, *slot),
            Instr::WaitCopy { slot } => {
                match *self.slot(*slot)? {
                    SlotState::Copying(event) => self.plan.actions.push(Action::Await(Lane::Compute, event)),
                    SlotState::Before | SlotState::Readable => {}
                    SlotState::Free(_) => return Err(format!("slot {slot} was freed and not filled again")),
                }
                *self.slot(*slot)? = SlotState::Readable;
                Ok(())
            }
            Instr::Free { slot } => {
                if let SlotState::Copying(_) = *self.slot(*slot)? {
                    return Err(format!("slot {slot} is freed before its copy was waited for"));
                }
                let event = self.event();
                *self.slot(*slot)? = SlotState::Free(event);
                self.plan.actions.push(Action::Signal(Lane::Compute, event));
                Ok(())
            }
        }
    }

    fn copy(&mut self, segments: &[Segment], slot: u32) -> Result<(), String> {
        match *self.slot(slot)? {
            SlotState::Readable => return Err(format!("slot {slot} is overwritten while it may be read")),
            SlotState::Free(event) => self.plan.actions.push(Action::Await(Lane::Copy, event)),
            SlotState::Before | SlotState::Copying(_) => {}
        }
        for segment in segments {
            if !matches!(segment.place, Place::Slot { slot: s, .. } if s == slot) {
                return Err(format!("{:?} in a copy into slot {slot}", segment.place));
            }
            let tensor = self.segment(segment)?;
            let bytes = tensor.format.total_row_bytes(tensor.cols) as u64 * segment.rows as u64;
            self.plan.copied_bytes += bytes;
            self.plan.actions.push(Action::CopyIn(*segment, bytes));
        }
        let event = self.event();
        self.plan.actions.push(Action::Signal(Lane::Copy, event));
        *self.slot(slot)? = SlotState::Copying(event);
        Ok(())
    }

    /// The tensor of a segment whose slab lies where it can.
    fn segment(&self, segment: &Segment) -> Result<&Tensor, String> {
        let tensor = self.model.tensor(segment.tensor);
        let (_, bytes) = slab(tensor, segment.rows).ok_or_else(|| format!("{}: too many bytes", tensor.name))?;
        let offset = match segment.place {
            Place::File => return Err(format!("{}: this device can't compute from the file", tensor.name)),
            Place::Resident { offset } => offset,
            Place::HostMapped => 0,
            Place::Slot { slot, offset } => {
                if slot >= self.program.slots || offset.checked_add(bytes).is_none_or(|e| e > self.program.slot_bytes) {
                    return Err(format!(
                        "{}: {bytes} bytes at {offset} of slot {slot}; there are {} slots of {}",
                        tensor.name, self.program.slots, self.program.slot_bytes
                    ));
                }
                offset
            }
        };
        if !offset.is_multiple_of(PLANE_ALIGN as u64) || offset.checked_add(bytes).is_none() {
            return Err(format!("{}: {bytes} bytes at {offset}", tensor.name));
        }
        Ok(tensor)
    }

    fn op(&mut self, op: &Op) -> Result<(), String> {
        let config = &self.model.config;
        match op {
            Op::Embed { table } => {
                if self.plan.table.is_some_and(|t| t != *table) {
                    return Err("embeddings from two tables".to_string());
                }
                self.plan.table = Some(*table);
                self.launch(Task::Embed(*table));
            }
            Op::Norm { weight, rows } => self.activate(Source::Norm(*weight), *rows, config.hidden),
            Op::Quantise => self.activate(Source::Attention, RowSet::All, Buffer::Attention.width(config)),
            Op::Swiglu => self.activate(Source::Swiglu, RowSet::All, config.ffn),
            Op::Linear { segments, bias, out, column, accumulate } => {
                self.linear(segments, *bias, *out, *column, *accumulate)?;
            }
            Op::RopeAppend { layer } => self.launch(Task::Rope(*layer)),
            Op::Attention { layer } => self.launch(Task::Attention(*layer)),
            Op::Argmax => {
                self.plan.chooses = true;
                self.launch(Task::Argmax);
            }
        }
        Ok(())
    }

    fn activate(&mut self, source: Source, rows: RowSet, width: usize) {
        let activation = ActivationTask { source, rows, width, codes: false, floats: false };
        self.current = Some((self.plan.actions.len(), activation));
        self.launch(Task::Activate(activation));
    }

    fn linear(
        &mut self,
        segments: &[Segment],
        bias: Option<TensorId>,
        out: Buffer,
        column: usize,
        accumulate: bool,
    ) -> Result<(), String> {
        let Some((made_at, mut activation)) = self.current else {
            return Err("a linear layer without an activation".to_string());
        };
        let Some(first) = segments.first() else { return Ok(()) };
        let format = self.model.tensor(first.tensor).format;
        let mut parts = Vec::with_capacity(segments.len());
        for segment in segments {
            if let Place::Slot { slot, .. } = segment.place
                && *self.slot(slot)? != SlotState::Readable
            {
                return Err(format!("slot {slot} is read before its copy was waited for"));
            }
            self.segment(segment)?;
            parts.push(Part { segment: *segment, bias, column: column + segment.row, accumulate });
        }
        activation.codes |= format.is_quantised();
        activation.floats |= !format.is_quantised();
        let widest = if format.is_quantised() { &mut self.plan.codes_width } else { &mut self.plan.floats_width };
        *widest = (*widest).max(activation.width);
        if let Some(action) = self.plan.actions.get_mut(made_at) {
            *action = Action::Launch(Task::Activate(activation));
        }
        self.current = Some((made_at, activation));
        let model = self.model;
        let joins = |task: &LinearTask| {
            let same = task.parts.first().is_some_and(|p| model.tensor(p.segment.tensor).format == format);
            same && task.out == out
                && parts.iter().all(|p| {
                    task.parts
                        .iter()
                        .all(|b| p.column + p.segment.rows <= b.column || b.column + b.segment.rows <= p.column)
                })
        };
        // The action before is a launch that reads the same activation: one launch serves both.
        if let Some(Action::Launch(Task::Linear(task))) = self.plan.actions.last_mut()
            && joins(task)
        {
            task.parts.extend(parts);
            return Ok(());
        }
        self.launch(Task::Linear(LinearTask { rows: activation.rows, out, parts }));
        Ok(())
    }
}
