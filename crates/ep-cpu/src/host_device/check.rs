//! Proves, when a program is recorded, that its copies, waits and reads cannot race, in one step or from step to step.

use std::sync::Arc;

use headrace_model::ModelSpec;
use headrace_model::spec::TensorId;
use headrace_provider::{Instr, Op, Place, Segment, StepProgram};

use super::source::segment_bytes;

/// What a program may not do with the weights range and the staging ring.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// A segment names nothing of the model, or lies crookedly.
    #[error("instruction {at}: {what}")]
    Segment {
        /// Instruction.
        at: usize,
        /// What is wrong.
        what: String,
    },
    /// Resident bytes that aren't backed.
    #[error("instruction {at}: reads bytes {offset} + {bytes} of the weights range, which are not mapped")]
    NotMapped {
        /// Instruction.
        at: usize,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// The ring is larger than the staging range.
    #[error("{slots} slots of {slot_bytes} bytes, but {mapped} bytes of the staging range are mapped")]
    RingTooLarge {
        /// Slots.
        slots: u32,
        /// Bytes of one.
        slot_bytes: u64,
        /// Bytes mapped.
        mapped: u64,
    },
    /// A slot that the ring doesn't have.
    #[error("instruction {at}: slot {slot} of {slots}")]
    NoSlot {
        /// Instruction.
        at: usize,
        /// Slot.
        slot: u32,
        /// Slots of the ring.
        slots: u32,
    },
    /// A segment that is larger than its slot.
    #[error("instruction {at}: bytes up to {end} of slot {slot}, which has {slot_bytes}")]
    BehindSlot {
        /// Instruction.
        at: usize,
        /// Slot.
        slot: u32,
        /// First byte behind the segment.
        end: u64,
        /// Bytes of the slot.
        slot_bytes: u64,
    },
    /// A copy whose segments overlap, or belong to several slots, or that has none.
    #[error("instruction {at}: the segments copied into slot {slot} don't lie in it side by side")]
    BadCopy {
        /// Instruction.
        at: usize,
        /// Slot.
        slot: u32,
    },
    /// A linear layer reads weights where this device has none.
    #[error("instruction {at}: {place:?} is not a place of this device")]
    NoPlace {
        /// Instruction.
        at: usize,
        /// The place.
        place: Place,
    },
    /// The program uses a slot that it never fills.
    #[error("instruction {at}: slot {slot} is read or waited for, but the program never copies into it")]
    NeverCopied {
        /// Instruction.
        at: usize,
        /// Slot.
        slot: u32,
    },
    /// A slot is read before its copy was waited for.
    #[error("instruction {at}: slot {slot} is read without a wait for its copy")]
    NoWait {
        /// Instruction.
        at: usize,
        /// Slot.
        slot: u32,
    },
    /// A slot is read after it was released.
    #[error("instruction {at}: slot {slot} is read after it was released")]
    ReadAfterFree {
        /// Instruction.
        at: usize,
        /// Slot.
        slot: u32,
    },
    /// A copy into a slot that has readers which were not released.
    #[error("instruction {at}: slot {slot} is copied into, but was not released after it was read")]
    NoFree {
        /// Instruction.
        at: usize,
        /// Slot.
        slot: u32,
    },
    /// A slot holds other rows than the ones that are read.
    #[error("instruction {at}: slot {slot} doesn't hold rows {row} + {rows} of tensor {} at {offset}", tensor.0)]
    WrongContents {
        /// Instruction.
        at: usize,
        /// Slot.
        slot: u32,
        /// Tensor read.
        tensor: TensorId,
        /// First row read.
        row: usize,
        /// Rows read.
        rows: usize,
        /// Offset read.
        offset: u64,
    },
}

/// What a program needs to be so when it runs.
#[derive(Clone, Debug, Default)]
pub struct Needs {
    /// Bytes of the weights range that are read: offset, length.
    pub resident: Vec<(u64, u64)>,
    /// What is read of a slot before the program's own first copy into it.
    pub heads: Vec<(u32, Segment)>,
    /// What each slot holds when the program is done, for the slots that it copies into.
    pub tails: Vec<(u32, Arc<[Segment]>)>,
}

/// What the checker knows of a slot.
#[derive(Clone, Copy, Default)]
struct Slot<'a> {
    /// What the last copy put there; `None` before the program's first.
    contents: Option<&'a [Segment]>,
    waited: bool,
    freed: bool,
    /// Read since it was last released.
    read: bool,
}

/// Checks `program`. `mapped` tells whether `(offset, bytes)` of the weights range is backed.
///
/// # Errors
/// The first thing that is wrong.
pub fn check(
    program: &StepProgram,
    model: &ModelSpec,
    staging: u64,
    mapped: impl Fn(u64, u64) -> bool,
) -> Result<Needs, ScheduleError> {
    ring_fits(program, staging)?;
    let mut needs = Needs::default();
    let mut slots = vec![Slot::default(); program.slots as usize];
    // Twice, because the end of a step copies what the head of the next one reads.
    for round in 0..2 {
        for (at, instr) in program.instrs.iter().enumerate() {
            match instr {
                Instr::Copy { segments, slot } => {
                    let state = slot_of(&mut slots, at, *slot)?;
                    if state.read {
                        return Err(ScheduleError::NoFree { at, slot: *slot });
                    }
                    check_copy(program, model, at, *slot, segments)?;
                    *state = Slot { contents: Some(segments), ..Slot::default() };
                }
                Instr::WaitCopy { slot } => {
                    let state = slot_of(&mut slots, at, *slot)?;
                    if round > 0 && state.contents.is_none() {
                        return Err(ScheduleError::NeverCopied { at, slot: *slot });
                    }
                    state.waited = true;
                }
                Instr::Free { slot } => {
                    let state = slot_of(&mut slots, at, *slot)?;
                    (state.freed, state.read) = (true, false);
                }
                Instr::Op(Op::Linear { segments, .. }) => {
                    for segment in segments {
                        let place = segment.place;
                        match place {
                            Place::File => return Err(ScheduleError::NoPlace { at, place }),
                            Place::Resident { offset } if round == 0 => {
                                let bytes = bytes_of(model, at, segment, offset)?;
                                let len = bytes.end - bytes.start;
                                if !mapped(offset, len) {
                                    return Err(ScheduleError::NotMapped { at, offset, bytes: len });
                                }
                                needs.resident.push((offset, len));
                            }
                            Place::Resident { .. } => {}
                            Place::HostMapped => {
                                bytes_of(model, at, segment, 0)?;
                            }
                            Place::Slot { slot, offset } => {
                                let state = slot_of(&mut slots, at, slot)?;
                                in_slot(program, model, at, slot, segment, offset)?;
                                read(state, at, slot, segment, offset, round)?;
                                if state.contents.is_none() {
                                    needs.heads.push((slot, *segment));
                                }
                            }
                        }
                    }
                }
                Instr::Op(_) => {}
            }
        }
        if round == 0 {
            // A wait of one step says nothing about the next one: its head waits again.
            slots.iter_mut().for_each(|s| s.waited = false);
        }
    }
    let tails = slots.iter().enumerate().filter_map(|(i, s)| s.contents.map(|c| (i as u32, Arc::from(c))));
    needs.tails = tails.collect();
    Ok(needs)
}

/// Checks that the program's ring lies in the mapped part of the staging range.
///
/// # Errors
/// [`ScheduleError::RingTooLarge`].
pub fn ring_fits(program: &StepProgram, mapped: u64) -> Result<(), ScheduleError> {
    let (slots, slot_bytes) = (program.slots, program.slot_bytes);
    match u64::from(slots).checked_mul(slot_bytes) {
        Some(bytes) if bytes <= mapped => Ok(()),
        _ => Err(ScheduleError::RingTooLarge { slots, slot_bytes, mapped }),
    }
}

fn read(
    state: &mut Slot<'_>,
    at: usize,
    slot: u32,
    segment: &Segment,
    offset: u64,
    round: usize,
) -> Result<(), ScheduleError> {
    if state.freed {
        return Err(ScheduleError::ReadAfterFree { at, slot });
    }
    match state.contents {
        Some(contents) if !contents.contains(segment) => {
            let Segment { tensor, row, rows, .. } = *segment;
            return Err(ScheduleError::WrongContents { at, slot, tensor, row, rows, offset });
        }
        None if round > 0 => return Err(ScheduleError::NeverCopied { at, slot }),
        _ => {}
    }
    if !state.waited {
        return Err(ScheduleError::NoWait { at, slot });
    }
    state.read = true;
    Ok(())
}

fn slot_of<'s, 'a>(slots: &'s mut [Slot<'a>], at: usize, slot: u32) -> Result<&'s mut Slot<'a>, ScheduleError> {
    let count = slots.len() as u32;
    slots.get_mut(slot as usize).ok_or(ScheduleError::NoSlot { at, slot, slots: count })
}

fn bytes_of(
    model: &ModelSpec,
    at: usize,
    segment: &Segment,
    offset: u64,
) -> Result<std::ops::Range<u64>, ScheduleError> {
    segment_bytes(model, segment, offset).map_err(|what| ScheduleError::Segment { at, what })
}

fn in_slot(
    program: &StepProgram,
    model: &ModelSpec,
    at: usize,
    slot: u32,
    segment: &Segment,
    offset: u64,
) -> Result<std::ops::Range<u64>, ScheduleError> {
    let bytes = bytes_of(model, at, segment, offset)?;
    if bytes.end > program.slot_bytes {
        return Err(ScheduleError::BehindSlot { at, slot, end: bytes.end, slot_bytes: program.slot_bytes });
    }
    Ok(bytes)
}

fn check_copy(
    program: &StepProgram,
    model: &ModelSpec,
    at: usize,
    slot: u32,
    segments: &[Segment],
) -> Result<(), ScheduleError> {
    let mut taken = Vec::with_capacity(segments.len());
    for segment in segments {
        match segment.place {
            Place::Slot { slot: own, offset } if own == slot => {
                taken.push(in_slot(program, model, at, slot, segment, offset)?);
            }
            _ => return Err(ScheduleError::BadCopy { at, slot }),
        }
    }
    taken.sort_by_key(|r| r.start);
    if taken.is_empty() || taken.windows(2).any(|w| w[0].end > w[1].start) {
        return Err(ScheduleError::BadCopy { at, slot });
    }
    Ok(())
}
