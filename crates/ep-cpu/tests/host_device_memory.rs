//! The host device's memory: its capacity, its counts, what becomes of stale addresses, the fence, faults on demand.
#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking

mod host_rig;

use std::time::Instant;

use headrace_ep_cpu::host_device::{Fault, FaultPoint, HostDevice, HostOptions};
use headrace_provider::{DeviceError, Place, Provider, RangeKind};
use headrace_testing::ModelShape;
use host_rig::{GRANULE, PAGES, Rig, geometry, options, place, tokens};

const SLOTS: u32 = 3;

fn rig(options: HostOptions) -> Rig {
    Rig::new(HostDevice::new(options).unwrap(), &ModelShape::default(), 2, 11)
}

fn ranges_total(rig: &Rig) -> u64 {
    let ranges = [RangeKind::Weights, RangeKind::Staging, RangeKind::Kv, RangeKind::Workspace];
    let fixed = rig.device.fixed_bytes().next_multiple_of(GRANULE);
    ranges.into_iter().map(|r| rig.device.mapped(r)).sum::<u64>() + fixed
}

#[track_caller]
fn out_of_memory<T: std::fmt::Debug>(result: Result<T, DeviceError>) {
    assert!(matches!(result, Err(DeviceError::OutOfMemory { .. })), "{result:?}");
}

#[test]
fn capacity_is_enforced_to_the_granule_and_counts_are_exact() {
    let all = rig(options(1));
    let probe = all.device.probe();
    let base = ranges_total(&all);
    assert_eq!((probe.total(), probe.peak_total()), (base, base));
    assert!(all.device.fixed_bytes() > 0);
    // Five granules more than what is taken from the beginning.
    let mut rig = rig(HostOptions { capacity: Some(base + 5 * GRANULE + 1), ..options(1) });
    let probe = rig.device.probe();
    let device = &mut rig.device;
    device.map(RangeKind::Weights, 2 * GRANULE, 2 * GRANULE).unwrap();
    device.map(RangeKind::Weights, 8 * GRANULE, GRANULE).unwrap();
    assert_eq!(device.resize(RangeKind::Staging, 1).unwrap(), GRANULE);
    assert_eq!(device.mapped(RangeKind::Weights), 3 * GRANULE);
    out_of_memory(device.map(RangeKind::Weights, 10 * GRANULE, 2 * GRANULE));
    out_of_memory(device.resize(RangeKind::Staging, 2 * GRANULE + 1));
    out_of_memory(device.resize(RangeKind::Kv, u64::MAX));
    out_of_memory(device.resize(RangeKind::Weights, 7 * GRANULE));
    assert_eq!((device.mapped(RangeKind::Weights), device.mapped(RangeKind::Staging)), (3 * GRANULE, GRANULE));
    device.map(RangeKind::Weights, 10 * GRANULE, GRANULE).unwrap();
    assert_eq!(probe.total(), base + 5 * GRANULE);
    // Mapped twice, not mapped, crooked.
    for (offset, bytes) in
        [(10 * GRANULE, GRANULE), (9 * GRANULE, 2 * GRANULE), (1, GRANULE), (0, 1), (1 << 50, GRANULE)]
    {
        assert!(matches!(device.map(RangeKind::Weights, offset, bytes), Err(DeviceError::Invalid { .. })));
    }
    for (offset, bytes) in [(0, GRANULE), (3 * GRANULE, 2 * GRANULE), (2 * GRANULE + 1, GRANULE), (1 << 50, GRANULE)] {
        assert!(matches!(device.unmap(RangeKind::Weights, offset, bytes), Err(DeviceError::Invalid { .. })));
    }
    assert!(device.map(RangeKind::Kv, 0, GRANULE).is_err() && device.unmap(RangeKind::Kv, 0, GRANULE).is_err());
    device.unmap(RangeKind::Weights, 2 * GRANULE, GRANULE).unwrap();
    assert_eq!((probe.mapped(RangeKind::Weights), probe.peak(RangeKind::Weights)), (3 * GRANULE, 4 * GRANULE));
    // A new size maps before it unmaps, so that a failure changes nothing: one granule is free, two are not.
    out_of_memory(device.resize(RangeKind::Weights, 2 * GRANULE));
    assert_eq!(device.resize(RangeKind::Weights, GRANULE).unwrap(), GRANULE);
    assert_eq!(device.mapped(RangeKind::Weights), GRANULE);
    assert!(device.read(RangeKind::Weights, 3 * GRANULE, &mut [0]).is_err());
    device.resize(RangeKind::Weights, 0).unwrap();
    device.resize(RangeKind::Staging, 0).unwrap();
    assert_eq!((probe.total(), probe.peak_total()), (base, base + 5 * GRANULE));
    // Not even what the device itself needs fits.
    let mut tiny = HostDevice::new(HostOptions { capacity: Some(GRANULE), ..options(1) }).unwrap();
    out_of_memory(tiny.attach(rig.model.clone(), geometry(&rig.model)));
    assert!(HostDevice::new(HostOptions { granule: 1000, ..options(1) }).is_err());
    assert!(HostDevice::new(HostOptions { granule: 0, ..options(1) }).is_err());
}

#[test]
fn a_context_length_that_no_table_can_hold_is_an_error() {
    let mut model = headrace_testing::random_model(1, &ModelShape::default());
    model.config.max_context = usize::MAX;
    let mut device = HostDevice::new(HostOptions { positions: None, ..options(1) }).unwrap();
    let kv = geometry(&model);
    out_of_memory(device.attach(std::sync::Arc::new(model), kv));
}

#[test]
fn a_stale_address_faults() {
    let exe = std::env::current_exe().unwrap();
    let run = |stale: &str| {
        let mut child = std::process::Command::new(&exe);
        child.args(["--exact", "child_that_reads_a_granule", "--ignored"]).env("HEADRACE_TEST_STALE", stale);
        child.output().unwrap().status
    };
    use std::os::unix::process::ExitStatusExt;
    assert!(run("0").success(), "reading a mapped granule");
    assert_eq!(run("1").signal(), Some(libc_sigsegv()));
}

/// Linux's number.
fn libc_sigsegv() -> i32 {
    11
}

#[test]
#[ignore = "run by a_stale_address_faults, in a process of its own"]
fn child_that_reads_a_granule() {
    let mut rig = rig(options(1));
    rig.device.map(RangeKind::Weights, 0, 2 * GRANULE).unwrap();
    let address = rig.device.weights_address().unwrap();
    let read = || {
        // SAFETY: mapped, unless this process is to be ended by it.
        unsafe { address.add(GRANULE as usize).read_volatile() }
    };
    assert_eq!(read(), 0xff, "new memory is poisoned");
    if std::env::var("HEADRACE_TEST_STALE").as_deref() == Ok("1") {
        rig.device.unmap(RangeKind::Weights, GRANULE, GRANULE).unwrap();
        read();
    }
}

/// Copies for the next step are on their way when a step is over. Without the fence, unmapping the ring under them ends
/// this process.
#[test]
fn unmapping_waits_for_copies_on_their_way() {
    let slow = HostOptions { link: Some(200 << 10), ..options(2) };
    let mut rig = rig(slow);
    let tokens = tokens(1, 6, rig.model.config.vocab);
    let want = rig.expected(&tokens);
    let half: Vec<bool> = (0..rig.pieces.len()).map(|i| i % 4 != 0).collect();
    rig.place(half.clone()).unwrap();
    let probe = rig.device.probe();
    for (i, token) in tokens.iter().enumerate() {
        let step = rig.begin(SLOTS).unwrap();
        assert_eq!(rig.step(step, i, &[*token]).unwrap(), want[i]);
        let (before, fences) = (probe.copies(), probe.fences());
        let clock = Instant::now();
        if i % 2 == 0 {
            rig.device.resize(RangeKind::Staging, 0).unwrap();
        } else {
            rig.device.unmap(RangeKind::Weights, rig.granules(&half)[0] * GRANULE, GRANULE).unwrap();
            rig.device.map(RangeKind::Weights, rig.granules(&half)[0] * GRANULE, GRANULE).unwrap();
            rig.resident.fill(false);
            rig.device.resize(RangeKind::Weights, 0).unwrap();
            rig.place(half.clone()).unwrap();
        }
        assert!(probe.fences() > fences);
        let copied = probe.copies() - before;
        assert!(copied > 0, "nothing was on its way: this test shows nothing ({:?})", clock.elapsed());
    }
}

#[test]
fn a_device_is_dropped_while_copies_are_on_their_way() {
    let slow = HostOptions { link: Some(100 << 10), ..options(1) };
    let mut rig = rig(slow);
    rig.begin(SLOTS).unwrap();
    drop(rig);
}

#[test]
fn every_fault_is_reported_once_and_leaves_the_device_usable() {
    let points = [
        FaultPoint::Map,
        FaultPoint::Unmap,
        FaultPoint::Resize,
        FaultPoint::Load,
        FaultPoint::Copy,
        FaultPoint::Record,
        FaultPoint::Run,
    ];
    for (threads, point) in [1, 2].into_iter().flat_map(|t| points.map(|p| (t, p))) {
        for nth in 1..=7 {
            let mut rig = rig(options(threads));
            let probe = rig.device.probe();
            let tokens = tokens(9, 2, rig.model.config.vocab);
            let want = rig.expected(&tokens);
            let cold: Vec<bool> = (0..rig.pieces.len()).map(|i| i % 3 == 0).collect();
            let more: Vec<bool> = (0..rig.pieces.len()).map(|i| i % 3 != 1).collect();
            rig.device.inject(Fault { at: point, nth });
            let result = life(&mut rig, &cold, &more, &tokens, &want);
            assert!(result.is_err() || nth > 1, "{point:?} did not fail");
            if let Err(error) = result {
                let memory = matches!(point, FaultPoint::Map | FaultPoint::Resize);
                assert_eq!(matches!(error, DeviceError::OutOfMemory { .. }), memory, "{point:?} {error}");
                assert_eq!(matches!(error, DeviceError::Failed { .. }), !memory, "{point:?} {error}");
                assert!(error.to_string().contains("asked for"), "{point:?} {error}");
                assert_eq!(probe.fired(), 1);
            }
            assert_eq!(probe.total(), ranges_total(&rig));
            // From the beginning again: a fault fires once. One that lay behind the last operation may still come.
            for _ in 0..2 {
                rig.resident.fill(false);
                if rig.device.resize(RangeKind::Weights, 0).is_ok()
                    && rig.device.resize(RangeKind::Staging, 0).is_ok()
                    && life(&mut rig, &cold, &more, &tokens, &want).is_ok()
                {
                    break;
                }
            }
            rig.resident.fill(false);
            rig.device.resize(RangeKind::Weights, 0).unwrap();
            life(&mut rig, &cold, &more, &tokens, &want).unwrap();
            let (device, file) = rig.resident_bytes();
            assert!(device == file);
        }
    }
}

fn life(rig: &mut Rig, cold: &[bool], more: &[bool], tokens: &[u32], want: &[Vec<u32>]) -> Result<(), DeviceError> {
    for resident in [cold, more, cold] {
        rig.place(resident.to_vec())?;
        let step = rig.begin(SLOTS)?;
        for (i, token) in tokens.iter().enumerate() {
            assert_eq!(rig.step(step, i, &[*token])?, want[i]);
        }
        // A copy that fails behind the last step belongs to the next one.
        rig.step(step, 0, &tokens[..1])?;
    }
    Ok(())
}

#[test]
fn ranges_are_read_written_and_loaded_within_their_bounds() {
    let mut rig = rig(options(1));
    let segments = place(&rig.pieces[0].runs, |offset| Place::Resident { offset });
    assert!(rig.device.load(&segments).is_err(), "nothing is mapped there");
    rig.device.map(RangeKind::Weights, 0, GRANULE).unwrap();
    rig.device.write(RangeKind::Weights, GRANULE - 4, &[1, 2, 3, 4]).unwrap();
    rig.device.copy_within(RangeKind::Weights, GRANULE - 4, 8, 4).unwrap();
    let mut back = [0; 6];
    rig.device.read(RangeKind::Weights, 7, &mut back).unwrap();
    assert_eq!(back, [0xff, 1, 2, 3, 4, 0xff]);
    assert!(rig.device.read(RangeKind::Weights, GRANULE - 5, &mut back).is_err());
    assert!(rig.device.write(RangeKind::Weights, GRANULE, &[1]).is_err());
    assert!(rig.device.copy_within(RangeKind::Weights, 0, GRANULE, 1).is_err());
    assert!(rig.device.load(&place(&rig.pieces[0].runs, |offset| Place::Slot { slot: 0, offset })).is_err());
    assert!(rig.device.load(&place(&rig.pieces[0].runs, |_| Place::File)).is_err());
    let last = (PAGES * geometry(&rig.model).page_bytes()) as u64;
    assert!(rig.device.read(RangeKind::Kv, last.next_multiple_of(GRANULE), &mut back).is_err());
    // Slots are filled by hand, in place of the prologue's first copy.
    let step = rig.begin(SLOTS).unwrap();
    let token = [3u32];
    let want = rig.expected(&token).concat();
    rig.device.load(&place(&rig.pieces[1].runs, |offset| Place::Slot { slot: 0, offset })).unwrap();
    assert!(matches!(rig.step(step, 0, &token), Err(DeviceError::Invalid { .. })), "slot 0 holds piece 1");
    rig.device.load(&place(&rig.pieces[0].runs, |offset| Place::Slot { slot: 0, offset })).unwrap();
    assert_eq!(rig.step(step, 0, &token).unwrap(), want);
    assert!(rig.device.resize(RangeKind::Staging, 0).is_ok());
}
