//! The trait between the engine and a device: step programs, operands, device info.
