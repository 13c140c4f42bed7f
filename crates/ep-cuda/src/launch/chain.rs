//! The persistent kernel of one-row steps: how it divides shared memory, and its launch.

use cudarc::driver::sys::CUfunction;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::format::Format;

use super::linear::{class_of, is_piped_class, scale_bytes};
use super::module::Loader;
use super::{Follow, Kernels, LaunchError, Queue, Shape, launch_as};
use crate::abi::ChainArgs;
use crate::chain::{Area, DEPTHS, WARPS};

/// Shared memory of a block that isn't dynamic, and some reserve.
const RESERVE: usize = 2048;
/// Warps that combine a block of 32 elements of attention's result, and the shared memory that they need: as chain.cuh says.
const COMBINE_WARPS: usize = 8;
const COMBINE_BYTES: usize = 128 * 32 * 4 + 128 * 16 + 32;
/// Most chunks that a block attends to at once: named barriers are few, and one chunk's warps hide another's loads.
const MOST_SLOTS: usize = 4;

/// How a chain is launched: chosen once for each chain, by its needs and the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainShape {
    /// Blocks: the multiprocessors.
    pub blocks: usize,
    /// Warps of a block.
    pub warps: usize,
    /// Slots of a warp's ring.
    pub depth: usize,
    /// Bytes of shared memory before the rings.
    pub area: usize,
    /// Chunks that a block attends to at once.
    pub slots: usize,
    /// Bytes of shared memory in all.
    pub shared: usize,
}

impl ChainShape {
    /// What fits `shared` bytes of shared memory, for scales of `scale` bytes: most warps first, then most chunks of
    /// attention at once, then the deepest rings.
    pub fn fit(blocks: usize, shared: usize, scale: usize, area: &Area) -> Option<ChainShape> {
        let room = shared.saturating_sub(RESERVE + area.table);
        for warps in [WARPS, WARPS / 2] {
            if area.share > warps {
                continue;
            }
            let most = (warps.checked_div(area.share).unwrap_or(0)).min(MOST_SLOTS);
            let least = usize::from(area.keys > 0);
            for slots in (least..=most.max(least)).rev() {
                let (attention, combine) = match area.keys {
                    0 => (0, 0),
                    keys => (slots * keys + warps * area.query, warps / COMBINE_WARPS * COMBINE_BYTES),
                };
                let before = area.activation.max(attention).max(combine).next_multiple_of(128);
                // The last warp has no ring.
                let rings = DEPTHS.map(|depth| (depth, (warps - 1) * depth * (2048 + 128 * scale)));
                if let Some((depth, rings)) = rings.into_iter().find(|(_, bytes)| before + bytes <= room) {
                    let shared = before + rings + area.table;
                    return Some(ChainShape { blocks, warps, depth, area: before, slots, shared });
                }
            }
        }
        None
    }
}

/// The chain kernels of one format class, by depth.
pub(super) type ChainKernels = Vec<(usize, CUfunction)>;

/// Loads them, where the class has any.
pub(super) fn load(
    loader: &mut Loader,
    format: Format,
    width: ActivationWidth,
    capability: u32,
) -> Result<ChainKernels, LaunchError> {
    let class = class_of(format);
    if capability < 80 || !is_piped_class(class) {
        return Ok(Vec::new());
    }
    let w = if width == ActivationWidth::Int16 { "w16" } else { "w8" };
    DEPTHS
        .into_iter()
        .map(|depth| Ok((depth, loader.function(&format!("chain.{class}"), &format!("chain_{w}_d{depth}"))?)))
        .collect()
}

impl Kernels {
    /// How a chain with weights of `format` would be launched; `None` if this device can't.
    pub fn chain_shape(&self, format: Format, area: &Area) -> Option<ChainShape> {
        let loaded = self.format(format).is_ok_and(|f| !f.chain.is_empty());
        (self.cooperative && loaded)
            .then(|| ChainShape::fit(self.processors, self.shared_most, scale_bytes(format), area))
            .flatten()
    }

    /// Launches a chain.
    ///
    /// # Safety
    /// As for [`Kernels::linear`]; `args` and its lists were made for `shape`.
    pub unsafe fn chain(
        &self,
        queue: Queue,
        format: Format,
        shape: &ChainShape,
        args: &ChainArgs,
    ) -> Result<(), LaunchError> {
        let kernels = self.format(format)?;
        let function = kernels.chain.iter().find(|(depth, _)| *depth == shape.depth).map(|&(_, f)| f);
        let function = function
            .ok_or_else(|| LaunchError::Unsupported(format!("no chain kernel for {} on this device", format.name())))?;
        let args = ChainArgs { area: shape.area as u32, slots: shape.slots as u32, ..*args };
        let grid = Shape { grid: (shape.blocks, 1, 1), block: 32 * shape.warps as u32, shared: shape.shared };
        // SAFETY: by this function's contract; the kernel takes `ChainArgs`.
        unsafe { launch_as(function, grid, queue.stream, Follow::Together, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_are_as_deep_as_shared_memory_allows() {
        // A 14B shape with 16-bit activations: codes and the row for the norm, five query heads a key head.
        let area = Area { activation: 32_000, keys: 16_384, query: 640, share: 5, table: 20_000 };
        let most = ChainShape::fit(132, 232_448, 2, &area).unwrap();
        assert_eq!((most.warps, most.depth, most.slots), (16, 4, 3));
        assert!(most.shared <= 232_448 - RESERVE && most.area >= 3 * 16_384 + 16 * 640);
        // A table of more layers costs depth.
        let more = ChainShape::fit(132, 232_448, 2, &Area { table: 40_000, ..area }).unwrap();
        assert_eq!((more.warps, more.depth, more.slots), (16, 3, 3));
        let most = ChainShape::fit(132, 232_448, 2, &Area { table: 80_000, ..area }).unwrap();
        assert_eq!((most.warps, most.depth, most.slots), (16, 2, 3));
        // A card with 100 KiB a block.
        let small = ChainShape::fit(84, 101_376, 2, &area).unwrap();
        assert_eq!((small.warps, small.depth), (8, 2));
        assert!(ChainShape::fit(84, 65_536, 2, &area).is_none());
        assert!(ChainShape::fit(84, 232_448, 2, &Area { share: 17, ..area }).is_none());
    }
}
