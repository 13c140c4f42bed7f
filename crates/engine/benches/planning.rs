//! What a change of placement costs before a byte moves: cutting a model into pieces, planning it under a limit, writing the
//! step program. The model has 1,009 tensors, as a large decoder has.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use headrace_engine::EngineOptions;
use headrace_engine::layout::PieceLayout;
use headrace_engine::mode::PlacementMode;
use headrace_engine::plan::{DeviceNeeds, MemoryPlan, Sizes};
use headrace_engine::schedule::Schedule;
use headrace_kv::{KvGeometry, KvLayout};
use headrace_numerics::elementwise::KvDtype;
use headrace_numerics::format::Format;
use headrace_testing::{ModelShape, random_model};

const LAYERS: usize = 112;
const GRANULE: u64 = 4096;

fn planning(c: &mut Criterion) {
    let shape = ModelShape { layers: LAYERS, formats: vec![Format::Q4_0], ..ModelShape::default() };
    let model = random_model(1, &shape);
    assert!(model.tensors.len() > 1000, "{} tensors", model.tensors.len());
    let options = EngineOptions::default();
    let geometry = KvGeometry {
        layers: LAYERS,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        dtype: KvDtype::F16,
        layout: KvLayout::HeadMajor,
        page_tokens: KvGeometry::DEFAULT_PAGE_TOKENS,
    };
    // One piece a tensor, or nearly: the hardest case for the planner.
    let target = 8192;
    let layout = PieceLayout::new(&model, target);
    let kv = geometry.page_bytes() as u64 * 2;
    let limit = layout.range_bytes / 2 + kv;
    let sizes = Sizes {
        limit,
        workspace: GRANULE,
        geometry,
        max_context: 32,
        max_batch: 1,
        slots: 4,
        mode: PlacementMode::Stream,
        mapped_budget: 0,
        link: headrace_engine::auto::Link::Unmeasured,
        headroom: 0,
    };
    let needs = DeviceNeeds { fixed: GRANULE, ..DeviceNeeds::default() };
    let plan = MemoryPlan::new(&layout, GRANULE, &needs, &sizes).expect("half of the weights fit");
    assert!(plan.placement.cold().count() > 100);
    c.bench_function("cut 1,009 tensors into pieces", |b| b.iter(|| PieceLayout::new(black_box(&model), target)));
    c.bench_function("plan them at half of their bytes", |b| {
        b.iter(|| MemoryPlan::new(black_box(&layout), GRANULE, &needs, &sizes).map(|p| p.ring_bytes));
    });
    c.bench_function("write the step program", |b| {
        b.iter(|| Schedule::new(&model, &options, black_box(&layout), &plan.placement, plan.ring, 0));
    });
}

criterion_group!(benches, planning);
criterion_main!(benches);
