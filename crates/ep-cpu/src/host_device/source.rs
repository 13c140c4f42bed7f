//! Where the device's kernels find weights: the weights range, the staging ring, the host's own memory; embedding rows in the
//! file.

use std::ops::Range;
use std::ptr::NonNull;

use headrace_model::ModelSpec;
use headrace_model::spec::{Tensor, TensorId};
use headrace_numerics::format::{MAX_PLANES, WeightView};
use headrace_provider::program::PLANE_ALIGN;
use headrace_provider::{Place, Segment};

use crate::weights::{FileWeights, WeightSource};

const ALIGN: u64 = PLANE_ALIGN as u64;

/// Where the planes of `view` lie in a slab that begins at `offset`. Saturates instead of overflowing.
pub fn slab(view: &WeightView<'_>, offset: u64) -> [Range<u64>; MAX_PLANES] {
    slab_of(view.planes.map(|p| p.len() as u64), offset)
}

fn slab_of(planes: [u64; MAX_PLANES], mut offset: u64) -> [Range<u64>; MAX_PLANES] {
    planes.map(|bytes| {
        let at = offset..offset.saturating_add(bytes);
        offset = at.end.checked_next_multiple_of(ALIGN).unwrap_or(u64::MAX);
        at
    })
}

/// The bytes that a segment takes in its range or slot: from its first plane's start to its last one's end.
///
/// # Errors
/// What is wrong with the tensor or the rows.
pub fn segment_bytes(model: &ModelSpec, segment: &Segment, offset: u64) -> Result<Range<u64>, String> {
    let (tensor, planes) = planes(model, segment)?;
    if !offset.is_multiple_of(ALIGN) {
        return Err(format!("{}: offset {offset} is not a multiple of {ALIGN}", tensor.name));
    }
    Ok(offset..slab_of(planes, offset).into_iter().filter(|p| !p.is_empty()).map(|p| p.end).max().unwrap_or(offset))
}

/// Bytes of weights in a segment; 0 for one that names nothing of the model.
pub fn weight_bytes(model: &ModelSpec, segment: &Segment) -> u64 {
    planes(model, segment).map_or(0, |(_, planes)| planes.iter().sum())
}

fn planes<'a>(model: &'a ModelSpec, segment: &Segment) -> Result<(&'a Tensor, [u64; MAX_PLANES]), String> {
    let id = segment.tensor.0;
    let tensor = model.tensors.get(id).ok_or_else(|| format!("the model has no tensor {id}"))?;
    if segment.row.checked_add(segment.rows).is_none_or(|end| end > tensor.rows) {
        return Err(format!("{}: rows {} + {} of {}", tensor.name, segment.row, segment.rows, tensor.rows));
    }
    let bytes = |p| (tensor.format.row_bytes(p, tensor.cols) as u64).saturating_mul(segment.rows as u64);
    Ok((tensor, std::array::from_fn(bytes)))
}

/// The weights of a step on the device.
pub struct DeviceWeights<'a> {
    /// Model.
    pub model: &'a ModelSpec,
    /// Vectors, and the embedding.
    pub file: &'a FileWeights,
    /// The weights range: first byte, bytes of address space.
    pub weights: (NonNull<u8>, u64),
    /// The slots of the program's ring: first byte, bytes of one, their number.
    pub slots: (NonNull<u8>, u64, u32),
}

// SAFETY: the addresses are read only, under the rules that `segment` states.
unsafe impl Sync for DeviceWeights<'_> {}

impl WeightSource for DeviceWeights<'_> {
    fn segment(&self, segment: &Segment) -> Result<WeightView<'_>, String> {
        let (tensor, planes) = planes(self.model, segment)?;
        let (base, offset, size) = match segment.place {
            Place::Resident { offset } => (self.weights.0, offset, self.weights.1),
            Place::Slot { slot, offset } if slot < self.slots.2 => {
                // SAFETY: the slots lie within the staging range's reserved addresses: `record` and `run` check it.
                let slot = unsafe { self.slots.0.add(slot as usize * self.slots.1 as usize) };
                (slot, offset, self.slots.1)
            }
            Place::HostMapped => return self.file.segment(&Segment { place: Place::File, ..*segment }),
            place => return Err(format!("{}: {place:?} is not a place of this device", tensor.name)),
        };
        let slab = slab_of(planes, offset);
        if let Some(at) = slab.iter().find(|p| !p.is_empty() && p.end > size) {
            return Err(format!("{}: bytes {at:?} of {size}", tensor.name));
        }
        let planes = slab.map(|at| match at.is_empty() {
            true => &[][..],
            // SAFETY: within the range's addresses. That they are backed, and that no copy writes them between this step's
            // wait and its release, was checked when the program was recorded and again when it began to run; on a device
            // that was told not to check, by its maker's promise.
            false => unsafe {
                std::slice::from_raw_parts(base.add(at.start as usize).as_ptr(), (at.end - at.start) as usize)
            },
        });
        WeightView::new(tensor.format, segment.rows, tensor.cols, planes)
            .ok_or_else(|| format!("{}: {} columns don't fit the format", tensor.name, tensor.cols))
    }

    fn matrix(&self, id: TensorId) -> Result<WeightView<'_>, String> {
        self.file.matrix(id)
    }

    fn vector(&self, id: TensorId, len: usize) -> Result<&[f32], String> {
        self.file.vector(id, len)
    }
}
