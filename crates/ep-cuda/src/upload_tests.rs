//! Where copies of weights read from, without a card: registrations, pinned copies and the pool, under a ledger that refuses.

use std::sync::atomic::{AtomicU64, Ordering};

use headrace_model::ModelSpec;
use headrace_model::arrange::arrange_rows;
use headrace_model::file::ModelFile;
use headrace_numerics::format::Format;
use headrace_provider::{HostLease, HostLedger};
use headrace_testing::{ModelShape, random_model};

use super::*;
use crate::fake::FakeCalls;
use crate::faults::FaultPoint;

/// A model whose file is a mapping. The file is gone once it is mapped.
fn mapped_model(name: &str) -> Arc<ModelSpec> {
    let mut model = random_model(3, &ModelShape::default());
    let path = std::env::temp_dir().join(format!("headrace-upload-{name}-{}", std::process::id()));
    std::fs::write(&path, &model.files[0].bytes).unwrap();
    model.files[0] = ModelFile::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    Arc::new(model)
}

/// All rows of the first plane of each tensor that has one.
fn keys(model: &ModelSpec) -> Vec<PieceKey> {
    let of = |(tensor, t): (usize, &headrace_model::spec::Tensor)| PieceKey { tensor, plane: 0, row: 0, rows: t.rows };
    model.tensors.iter().enumerate().map(of).collect()
}

fn uploader(context: &Arc<Context>, model: &Arc<ModelSpec>) -> Uploader {
    Uploader::new(context, Arc::new(HostWeights::new(model.clone()).unwrap()))
}

/// A ledger of so many bytes, which sets some aside for buffers.
#[derive(Debug)]
struct Ledger {
    left: Arc<AtomicU64>,
    for_buffers: u64,
}

#[derive(Debug)]
struct Lease(Arc<AtomicU64>, u64);

impl HostLease for Lease {}

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.fetch_add(self.1, Ordering::Relaxed);
    }
}

impl HostLedger for Ledger {
    fn reserve(&self, of: HostUse, bytes: u64) -> Result<Box<dyn HostLease>, String> {
        let withheld = if of == HostUse::Buffer { 0 } else { self.for_buffers };
        let left = self.left.load(Ordering::Relaxed);
        if left < bytes + withheld {
            return Err(format!("host_limit leaves {left} bytes"));
        }
        self.left.fetch_sub(bytes, Ordering::Relaxed);
        Ok(Box::new(Lease(self.left.clone(), bytes)))
    }
}

const POOL: u64 = (BOUNCE_BUFFERS * BOUNCE_BYTES) as u64;

fn ledger(context: &Arc<Context>, bytes: u64) -> Arc<AtomicU64> {
    let left = Arc::new(AtomicU64::new(bytes));
    context.host().charge_to(Arc::new(Ledger { left: left.clone(), for_buffers: POOL.min(bytes) }));
    left
}

#[test]
fn a_registration_ends_before_its_mapping_does() {
    let calls = Arc::new(FakeCalls::default());
    let context = Context::fake(&calls);
    let model = mapped_model("order");
    let sum: u64 = model.files[0].bytes.iter().map(|&b| u64::from(b)).sum();
    let bytes = model.files[0].bytes.len() as u64;
    let mut uploader = uploader(&context, &model);
    assert!(matches!(uploader.origin(keys(&model)[0]), Ok(Origin::Stable(..))));
    assert_eq!((calls.locked(), uploader.counters().pinned_bytes), ((0, bytes), bytes), "registrations count");
    // Nobody else keeps the model: the uploader's own fields are all that hold the mapping.
    drop(model);
    drop(uploader);
    assert_eq!((calls.locked(), calls.read_at_end(), context.host().bytes()), ((0, 0), sum, 0));
}

#[test]
fn what_the_ledger_refuses_to_register_is_copied_and_then_goes_through_the_pool() {
    let calls = Arc::new(FakeCalls::default());
    let context = Context::fake(&calls);
    let model = mapped_model("refused");
    let file = model.files[0].bytes.len() as u64;
    let keys = keys(&model);
    let size = |key: &PieceKey| model.tensors[key.tensor].planes[0].map_or(0, |e| e.len as u64);
    // The pool, and the first tensor's bytes: not the whole file.
    let first = size(&keys[0]);
    let left = ledger(&context, POOL + first);
    let mut uploader = uploader(&context, &model);
    let Ok(Origin::Stable(at, len)) = uploader.origin(keys[0]) else { panic!("a pinned copy") };
    assert!(!model.files[0].bytes.as_ptr_range().contains(&at) && len as u64 == first);
    let Ok(Origin::Bounced(fills)) = uploader.origin(keys[1]) else { panic!("through the pool") };
    assert!(!fills.is_empty());
    let counters = uploader.counters();
    assert_eq!((counters.pinned_copy_bytes, counters.pinned_bytes), (first, first + POOL));
    assert_eq!((calls.locked(), left.load(Ordering::Relaxed)), ((first + POOL, 0), 0));
    let said = uploader.fallbacks().join("\n");
    for part in [
        "not registered: ".to_string(),
        format!("registration of {file} mapped bytes: host_limit leaves"),
        format!("{first} bytes of weights have a pinned copy"),
        format!("streamed through a pool of {POOL} pinned bytes"),
    ] {
        assert!(said.contains(&part), "{part:?} in {said}");
    }
    drop((uploader, fills));
    assert_eq!((calls.locked(), left.load(Ordering::Relaxed), context.host().bytes()), ((0, 0), POOL + first, 0));
}

/// A mapped model whose matrices a card keeps in planes.
fn model_in_planes(name: &str) -> Arc<ModelSpec> {
    let formats = vec![Format::Q4_0, Format::Q4_1, Format::Q4_K, Format::Q6_K];
    let shape =
        ModelShape { hidden: 256, ffn: 512, heads: 4, head_dim: 64, formats, tied: true, ..ModelShape::default() };
    let mut model = random_model(7, &shape);
    let path = std::env::temp_dir().join(format!("headrace-upload-{name}-{}", std::process::id()));
    std::fs::write(&path, &model.files[0].bytes).unwrap();
    model.files[0] = ModelFile::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    Arc::new(model).arranged(crate::launch::wanted_format)
}

/// Runs of rows of every plane of every matrix that is laid out anew, and the bytes that the card is to have of them.
fn rows_in_planes(model: &ModelSpec) -> Vec<(PieceKey, Vec<u8>)> {
    let mut all = Vec::new();
    for (tensor, t) in model.tensors.iter().enumerate() {
        let (Some(stored), Some(extent)) = (t.stored, t.planes[0]) else { continue };
        let size = stored.row_bytes(0, t.cols);
        for plane in 0..t.format.planes() {
            for (row, rows) in [(0, t.rows), (t.rows / 3, t.rows / 2)] {
                let from = &model.extent(extent)[row * size..(row + rows) * size];
                let mut to = vec![0; rows * t.format.row_bytes(plane, t.cols)];
                assert!(arrange_rows(stored, plane, t.cols, from, &mut to), "{}", t.name);
                all.push((PieceKey { tensor, plane, row, rows }, to));
            }
        }
    }
    let formats: std::collections::HashSet<_> = model.tensors.iter().filter_map(|t| t.stored).collect();
    assert!(formats.len() == 4 && all.len() > 20, "{formats:?}");
    all
}

#[test]
fn rows_in_planes_are_streamed_and_read_in_place_from_pinned_copies_of_their_own() {
    let calls = Arc::new(FakeCalls::default());
    let context = Context::fake(&calls);
    let model = model_in_planes("planes");
    let mut uploader = uploader(&context, &model);
    let mut bytes = 0;
    for (key, expected) in rows_in_planes(&model) {
        for _ in 0..2 {
            let Ok(Origin::Stable(at, len)) = uploader.origin(key) else { panic!("a pinned copy of {key:?}") };
            // SAFETY: the copy is the uploader's, which is alive.
            assert!(unsafe { std::slice::from_raw_parts(at, len) } == expected, "{key:?}");
        }
        bytes += expected.len() as u64;
    }
    assert_eq!(uploader.counters().pinned_copy_bytes, bytes, "each copy once");
    let (key, expected) = &rows_in_planes(&model)[0];
    let place = headrace_provider::Place::HostMapped;
    let segment = Segment { tensor: TensorId(key.tensor), row: key.row, rows: key.rows, place };
    let planes = uploader.in_place(&segment).unwrap();
    let copy = uploader.pinned.get(key).unwrap();
    assert!(copy.device() == planes[0] && copy.bytes()[..expected.len()] == expected[..]);
}

#[test]
fn rows_in_planes_that_cannot_be_pinned_go_through_the_pool_as_the_card_wants_them() {
    let calls = Arc::new(FakeCalls::default());
    let context = Context::fake(&calls);
    let model = model_in_planes("pool");
    ledger(&context, POOL);
    let mut uploader = uploader(&context, &model);
    for (key, expected) in rows_in_planes(&model) {
        for _ in 0..2 {
            let Ok(Origin::Bounced(fills)) = uploader.origin(key) else { panic!("through the pool: {key:?}") };
            assert!(!fills.is_empty() && uploader.plain.get(&key) == Some(&expected), "{key:?}");
        }
    }
}

#[test]
fn without_room_for_the_pool_streaming_is_refused_in_words() {
    let calls = Arc::new(FakeCalls::default());
    let context = Context::fake(&calls);
    let model = mapped_model("nothing");
    ledger(&context, 0);
    let mut uploader = uploader(&context, &model);
    let error = uploader.origin(keys(&model)[0]).err().unwrap();
    assert!(error.contains("host_limit leaves 0 bytes") && !error.contains("CUDA error"), "{error}");
}

#[test]
fn a_failure_of_the_driver_gives_its_charge_back() {
    let calls = Arc::new(FakeCalls::default());
    let context = Context::fake(&calls);
    let left = ledger(&context, 1 << 20);
    context.faults().refuse(FaultPoint::Pin, 0, 1, 0);
    assert!(PinnedBuffer::new(&context, 4096).is_err());
    assert_eq!((left.load(Ordering::Relaxed), context.host().bytes()), (1 << 20, 0));
    let buffer = PinnedBuffer::new(&context, 4096).unwrap();
    assert_eq!((left.load(Ordering::Relaxed), context.host().bytes()), ((1 << 20) - 4096, 4096));
    drop(buffer);
    assert_eq!((left.load(Ordering::Relaxed), calls.locked()), (1 << 20, (0, 0)));
}
