//! From a model and a program to what can be replayed: fixed image, layouts, addresses; and the way back.

use std::collections::HashMap;
use std::sync::Arc;

use headrace_kv::KvGeometry;
use headrace_model::ModelSpec;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::elementwise::KvDtype;
use headrace_numerics::format::Format;
use headrace_provider::{DeviceError, Place, RangeKind, StepProgram};

use super::{CudaProvider, FIXED, SCRATCH, STATE, range_index};
use crate::abi::{Activation, BLOCK};
use crate::attached::{Attached, FixedImage, check_config};
use crate::bind::{Addresses, Binder, HostMapped, Launch};
use crate::buckets::{GraphKey, PARTIALS_BYTES, attention_chunks};
use crate::chain::{Chain, chains};
use crate::descriptor::{DescriptorLayout, StepWriter};
use crate::host_memory::PinnedBuffer;
use crate::host_weights::HostWeights;
use crate::launch::ChainShape;
use crate::launch::HeadShape;
use crate::plan::{CapturePlan, plan};
use crate::recorded::{HostLayout, Recorded, ScratchLayout, StateLayout, buffer_offsets, formats, needs};
use crate::regions::Regions;
use crate::upload::Uploader;

/// Chunks of positions that the chains of a program keep partial results for: every one of the longest context.
fn chain_chunks(model: &ModelSpec, positions: usize) -> usize {
    attention_chunks(1, model.config.heads, model.config.head_dim, positions, PARTIALS_BYTES)
}

impl CudaProvider {
    /// The addresses that the graphs of a program are captured with.
    pub(crate) fn addresses(&self, recorded: &Recorded, model: &ModelSpec) -> Addresses {
        let (state, scratch) = (self.arena.base(STATE) + recorded.state_offset, self.arena.base(SCRATCH));
        let host = recorded.host.device();
        let workspace = self.arena.base(range_index(RangeKind::Workspace));
        Addresses {
            step: recorded.descriptor.at(state + recorded.state.descriptor),
            buffers: buffer_offsets(&recorded.program, model).map(|offset| workspace + offset),
            weights: self.arena.base(range_index(RangeKind::Weights)),
            host_mapped: HashMap::new(),
            staging: self.arena.base(range_index(RangeKind::Staging)),
            kv: self.arena.base(range_index(RangeKind::Kv)),
            vectors: self.vectors.clone(),
            cos: self.rope.0,
            sin: self.rope.1,
            codes: scratch + recorded.scratch.codes,
            steps: scratch + recorded.scratch.steps,
            floats: scratch + recorded.scratch.floats,
            table: recorded.table.unwrap_or(recorded.host_layout.gathered.map(|offset| host + offset)),
            gathered: recorded.table.is_none(),
            feedback: state + recorded.state.feedback,
            partials: scratch + recorded.scratch.partials,
            tickets: state + recorded.state.tickets,
            scratch: state + recorded.state.scratch,
            results: state + recorded.state.results,
            host_results: host + recorded.host_layout.results,
            host_flag: host + recorded.host_layout.flags,
            max_wanted: recorded.host_layout.max_wanted,
        }
    }

    /// The addresses of what a program reads in place on the host.
    pub(crate) fn host_mapped(&mut self, recorded: &Recorded) -> Result<HostMapped, DeviceError> {
        let mut addresses = HashMap::new();
        let Some(uploader) = &mut self.uploader else { return Err(self.context.invalid("no model is attached")) };
        for segment in recorded.plan.segments().filter(|s| s.place == Place::HostMapped) {
            let planes = uploader.in_place(segment).map_err(|e| self.context.failed(e))?;
            addresses.insert((segment.tensor, segment.row, segment.rows), planes);
        }
        Ok(addresses)
    }

    pub(super) fn take(&mut self, model: Arc<ModelSpec>, kv: KvGeometry) -> Result<(), DeviceError> {
        check_config(&model, &kv).map_err(|e| self.context.invalid(e))?;
        let weights = HostWeights::new(model.clone()).map_err(|e| self.context.invalid(e))?;
        if weights.transposed_bytes() > 0 {
            let bytes = weights.transposed_bytes();
            log::info!("{}: {bytes} bytes of column-major weights were transposed", self.context.name());
        }
        let image = FixedImage::new(&weights, self.most_positions).map_err(|e| self.context.invalid(e))?;
        self.grow(FIXED, image.bytes.len() as u64, "vectors and rotation tables")?;
        let base = self.arena.base(FIXED);
        self.put(base, &image.bytes)?;
        self.vectors = image.vectors.iter().map(|(&id, &at)| (id, base + at)).collect();
        self.rope = (base + image.cos, base + image.sin);
        let weights = Arc::new(weights);
        self.uploader = Some(Uploader::new(&self.context, weights.clone()));
        self.attached = Some(Attached { model, geometry: kv, weights, positions: image.positions });
        Ok(())
    }

    /// Loads the kernels that a plan launches, and counts what they take of the card among the fixed bytes.
    fn load_kernels(&mut self, width: ActivationWidth, formats: &[Format]) -> Result<(), DeviceError> {
        let (before, _) = self.context.memory_info().map_err(|e| self.context.failed(e))?;
        let heads = self.attached.as_ref().map(|a| HeadShape {
            share: (a.model.config.heads / a.model.config.kv_heads.max(1)) as u32,
            dim: a.model.config.head_dim,
            half: a.geometry.dtype == KvDtype::F16,
        });
        let loaded = self.launcher.prepare(width, formats, heads.as_ref()).map_err(|e| self.context.failed(e));
        let (after, _) = self.context.memory_info().map_err(|e| self.context.failed(e))?;
        self.kernel_bytes += before.saturating_sub(after);
        loaded
    }

    /// Bytes that recording so many programs like this one will take beyond the fixed ones, graphs not counted. Its kernels are loaded here, so
    /// that they are among the fixed bytes.
    pub(super) fn bytes_of(&mut self, program: &StepProgram, programs: u64) -> Result<u64, DeviceError> {
        let Some(attached) = &self.attached else { return Err(self.context.invalid("no model is attached")) };
        let model = attached.model.clone();
        let plan = plan(program, &model).map_err(|e| self.context.invalid(e))?;
        self.load_kernels(program.activations, &formats(&plan, &model))?;
        let Some(attached) = &self.attached else { return Err(self.context.invalid("no model is attached")) };
        let (model, positions) = (&attached.model, attached.positions);
        let page = attached.geometry.page_bytes().max(1) as u64;
        let store_pages = usize::try_from(self.context.card().total_bytes / page).unwrap_or(usize::MAX);
        let descriptor = DescriptorLayout::new(program, &attached.geometry, positions, store_pages);
        let granule = self.arena.granule();
        let scratch = ScratchLayout::new(&plan, program, model, positions).bytes.next_multiple_of(granule);
        let chains = chains(&plan, model, &attached.geometry, chain_chunks(model, positions));
        let state = StateLayout::new(&descriptor, model, &chains).bytes;
        let state = Regions::bytes_of(state, programs).next_multiple_of(granule);
        (self.whole[SCRATCH], self.whole[STATE]) = (scratch, state);
        Ok(scratch.saturating_add(state))
    }

    pub(super) fn record_program(&mut self, program: StepProgram) -> Result<Recorded, DeviceError> {
        let Some(attached) = &self.attached else { return Err(self.context.invalid("no model is attached")) };
        let (model, geometry, positions) = (attached.model.clone(), attached.geometry, attached.positions);
        let plan = plan(&program, &model).map_err(|e| self.context.invalid(e))?;
        self.load_kernels(program.activations, &formats(&plan, &model))?;
        let needs = needs(&plan, &program, &model);
        self.check_needs(&needs)?;
        let page = geometry.page_bytes().max(1) as u64;
        let store_pages = usize::try_from(self.context.card().total_bytes / page).unwrap_or(usize::MAX);
        let descriptor = DescriptorLayout::new(&program, &geometry, positions, store_pages);
        let scratch = ScratchLayout::new(&plan, &program, &model, positions);
        self.grow(SCRATCH, scratch.bytes, "activations")?;
        let table = plan.table.and_then(|table| self.uploader.as_mut().and_then(|u| u.mapped(table)));
        let host_layout = HostLayout::new(&descriptor, &plan, &model, table.is_some());
        let host_bytes = usize::try_from(host_layout.bytes).map_err(|e| self.context.invalid(e.to_string()))?;
        let host = PinnedBuffer::new(&self.context, host_bytes)
            .map_err(|e| self.context.no_memory("pinned host memory", host_layout.bytes, e))?;
        let mut chains = chains(&plan, &model, &geometry, chain_chunks(&model, positions));
        chains.retain(|chain| self.chain_shape(chain, &plan, &model, program.activations).is_some());
        let state = StateLayout::new(&descriptor, &model, &chains);
        let (before, state_offset) = (self.states.clone(), self.states.take(state.bytes));
        if let Err(error) = self.grow(STATE, self.states.end(), "a program's descriptor and results") {
            self.states = before;
            return Err(error);
        }
        // From here on the region has an owner that gives it back.
        let mut recorded = Recorded {
            program,
            plan,
            chains: Vec::new(),
            descriptor,
            scratch,
            state,
            state_offset,
            host,
            host_layout,
            needs,
            checked: self.unmappings,
            small: false,
            fills: Vec::new(),
            graphs: HashMap::new(),
            writer: StepWriter::default(),
            table,
            serial: 0,
            chosen: 0,
        };
        let mut image = recorded.state.image(recorded.program.max_wanted);
        let to = self.arena.base(STATE) + state_offset;
        let linked = self.link(&mut recorded, &chains, &model, &mut image);
        if let Err(error) = linked.and_then(|()| self.put(to, &image)) {
            self.forget(recorded);
            return Err(error);
        }
        Ok(recorded)
    }

    fn chain_shape(
        &self,
        chain: &Chain,
        plan: &CapturePlan,
        model: &ModelSpec,
        width: ActivationWidth,
    ) -> Option<ChainShape> {
        let block_bytes = Activation::codes_bytes(BLOCK, 1, width == ActivationWidth::Int16);
        self.launcher.chain_shape(width, chain.format, &chain.area(plan, model, block_bytes))
    }

    /// Writes the lists of a program's chains into the image of its region.
    fn link(
        &self,
        recorded: &mut Recorded,
        chains: &[Chain],
        model: &ModelSpec,
        image: &mut [u8],
    ) -> Result<(), DeviceError> {
        let Some(attached) = &self.attached else { return Err(self.context.invalid("no model is attached")) };
        let addresses = self.addresses(recorded, model);
        let binder = Binder {
            model,
            geometry: &attached.geometry,
            at: &addresses,
            width: recorded.program.activations,
            slot_bytes: recorded.program.slot_bytes,
            key: GraphKey { rows: 1, wanted: 1, chunks: chain_chunks(model, attached.positions) },
        };
        let mut offset = recorded.state.chains;
        for chain in chains {
            let Some(shape) = self.chain_shape(chain, &recorded.plan, model, recorded.program.activations) else {
                continue;
            };
            let at = self.arena.base(STATE) + recorded.state_offset + offset;
            let lists = chain.lists(&recorded.plan, &binder, at, (shape.blocks, shape.warps - 1));
            let (bytes, args) = lists.map_err(|e| self.context.invalid(e))?;
            if let Some(to) = image.get_mut(offset as usize..offset as usize + bytes.len()) {
                to.copy_from_slice(&bytes);
            }
            recorded.chains.push((chain.actions.clone(), Launch::Chain(chain.format, shape, args)));
            offset += chain.bytes();
        }
        Ok(())
    }

    /// Waits for the streams and gives back what a program holds.
    pub(super) fn forget(&mut self, mut recorded: Recorded) {
        if let Err(error) = self.streams.fence() {
            // A context that failed takes everything with it; nothing of the program can be given back.
            log::error!("{error}: a program is kept");
            std::mem::forget(recorded);
            return;
        }
        recorded.graphs.clear();
        self.states.give(recorded.state_offset, recorded.state.bytes);
    }

    /// Checks once after each unmapping that everything a program touches is still mapped.
    pub(crate) fn check_mapped(&self, recorded: &mut Recorded) -> Result<(), DeviceError> {
        if recorded.checked != self.unmappings {
            self.check_needs(&recorded.needs)?;
            recorded.checked = self.unmappings;
        }
        Ok(())
    }
}
