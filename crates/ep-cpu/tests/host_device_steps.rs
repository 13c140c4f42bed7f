//! Steps on the host device against the oracle, bit for bit: any placement, any ring, from epoch to epoch.
#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking

mod host_rig;

use headrace_ep_cpu::host_device::HostDevice;
use headrace_numerics::format::{Format, Nbits, ScaleType, ZeroPoint};
use headrace_provider::{Instr, Op, Provider, RangeKind};
use headrace_testing::{ModelShape, generator};
use host_rig::{GRANULE, Rig, options, tokens};
use rand::Rng;

/// No operation behind the last layer: the last slot is released when the step is over.
#[test]
fn a_program_that_ends_with_a_release() {
    let shape = ModelShape::default();
    let mut rig = Rig::new(HostDevice::new(options(2)).unwrap(), &shape, 2, 21);
    let tokens = tokens(21, 4, shape.vocab);
    let want = rig.expected(&tokens);
    let (prologue, mut step) = rig.schedule(3);
    assert_eq!(step.instrs.iter().position(|i| *i == Instr::Op(Op::Argmax)), Some(step.instrs.len() - 1));
    step.instrs.pop();
    let step = rig.begin_with(prologue, step).unwrap();
    for (i, token) in tokens.iter().enumerate() {
        assert_eq!(rig.step(step, i, &[*token]).unwrap(), want[i]);
        assert!(rig.output.tokens.is_empty());
    }
}

fn shapes() -> Vec<ModelShape> {
    let int4 = Format::Nbits(Nbits { bits: 4, block: 32, scale: ScaleType::F16, zero: ZeroPoint::PerBlock });
    vec![
        ModelShape::default(),
        ModelShape {
            formats: vec![int4, Format::Q8_0, Format::F16],
            bias: true,
            qk_norm: true,
            ..ModelShape::default()
        },
        ModelShape { formats: vec![Format::Q4_0], tied: true, fused: true, layers: 3, ..ModelShape::default() },
        ModelShape {
            formats: vec![Format::F32, Format::BF16],
            col_major: true,
            rope_tables: Some(Format::F16),
            window: Some(20),
            ..ModelShape::default()
        },
    ]
}

#[test]
fn steps_of_changing_epochs_equal_the_oracle() {
    for (seed, shape) in (0u64..).zip(shapes()) {
        for slots in 1..=4 {
            let mut rng = generator(100 * seed + u64::from(slots));
            let threads = rng.random_range(1..=3);
            let mut rig = Rig::new(HostDevice::new(options(threads)).unwrap(), &shape, 2, seed);
            let tokens = tokens(seed, 48, shape.vocab);
            let want = rig.expected(&tokens);
            let probe = rig.device.probe();
            let mut at = 0;
            // Epochs: everything cold, everything resident, and whatever comes.
            for epoch in 0..5 {
                let share = [0.0, 1.0, 0.5, 0.8, 0.3][epoch];
                let resident: Vec<bool> = rig.pieces.iter().map(|_| rng.random_bool(share)).collect();
                rig.place(resident).unwrap();
                let granules = rig.granules(&rig.resident).len() as u64;
                assert_eq!(rig.device.mapped(RangeKind::Weights), granules * GRANULE);
                let step = rig.begin(slots).unwrap();
                let cold = rig.resident.iter().filter(|r| !**r).count() as u64;
                let ring = u64::from(slots).min(cold);
                rig.device.fence();
                let before = probe.copies();
                let steps = rng.random_range(1..=4u64);
                for _ in 0..steps {
                    let n = rng.random_range(1..=3);
                    let got = rig.step(step, at, &tokens[at..at + n]).unwrap();
                    let case = format!("seed {seed}, {slots} slots, epoch {epoch}, position {at}, {threads} threads");
                    assert_eq!(got, want[at..at + n].concat(), "{case}");
                    at += n;
                }
                rig.device.fence();
                assert_eq!(probe.copies() - before, steps * cold, "{ring} slots of the ring");
                if !shape.col_major {
                    let (device, file) = rig.resident_bytes();
                    assert_eq!(device, file);
                }
            }
            assert!(probe.copied_bytes() > 0);
        }
    }
}
