//! The trait between the engine and a device: step programs, operands, memory ranges, device info.
//!
//! The engine decides what is where and in which order it is read; a provider records that as a program and replays it
//! once a step. Nothing here allocates device memory or computes.

#![forbid(unsafe_code)]

mod check;
pub mod device;
pub mod host;
pub mod program;
pub mod report;
pub mod step;
mod workspace;

pub use check::check;
pub use device::{DeviceError, DeviceInfo, ProgramId, Provider, RangeKind, Ticket};
pub use host::{HostLease, HostLedger, HostUse};
pub use program::{Buffer, Instr, Op, Place, RowSet, Segment, StepProgram};
pub use report::{ClockReport, DeviceReport, GraphReport, LinkCeilings, PhysicalFigure, PhysicalSource, SourceReport};
pub use step::{StepInput, StepOutput, Token, TokenRow};
