//! The device under test: buffers, the step descriptor, random inputs, comparison of bits.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result, sys};
use headrace_ep_cuda::abi::{Activation, StepHeader, StepRef, StepRow};
use headrace_ep_cuda::launch::{HeadShape, Kernels, Queue};
use headrace_numerics::activation::{ActivationWidth, QuantRow};
use headrace_numerics::format::Format;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// Context, stream, and the kernels for both widths.
pub struct Gpu {
    pub context: Arc<CudaContext>,
    pub stream: Arc<CudaStream>,
    pub kernels: [Kernels; 2],
}

/// Heads that the kernels are loaded for: whatever the tests ask of attention.
const MOST_SHARE: u32 = 20;
const DIMS: [usize; 3] = [20, 64, 128];

pub const WIDTHS: [ActivationWidth; 2] = [ActivationWidth::Int16, ActivationWidth::Int8];

impl Gpu {
    /// With the kernels of those weight formats.
    pub fn open(formats: &[Format]) -> Result<Gpu, String> {
        // SAFETY: looks for the driver library only.
        if !unsafe { sys::is_culib_present() } {
            return Err("no driver library".into());
        }
        let context = CudaContext::new(0).map_err(|e| e.to_string())?;
        let stream = context.new_stream().map_err(|e| e.to_string())?;
        let load = |width| {
            let mut kernels = Kernels::new(&context, width).map_err(|e| e.to_string())?;
            for share in 1..=MOST_SHARE {
                for (dim, half) in DIMS.iter().flat_map(|&dim| [(dim, true), (dim, false)]) {
                    let heads = HeadShape { share, dim, half };
                    kernels.prepare_attention(&heads).map_err(|e| format!("{heads:?}: {e}"))?;
                }
            }
            for &format in formats {
                kernels.prepare(format).map_err(|e| format!("{}: {e}", format.name()))?;
            }
            Ok::<_, String>(kernels)
        };
        let kernels = [load(WIDTHS[0])?, load(WIDTHS[1])?];
        Ok(Gpu { context, stream, kernels })
    }

    pub fn describe(&self) -> String {
        let name = self.context.name().unwrap_or_default();
        let k = &self.kernels[0];
        format!("{name}, compute capability {}, {} multiprocessors", k.capability(), k.processors())
    }

    pub fn queue(&self) -> Queue {
        Queue::plain(self.stream.cu_stream())
    }

    pub fn sync(&self) {
        self.stream.synchronize().expect("the stream runs to its end");
    }
}

/// Device memory, freed when dropped. Fresh memory is filled with 0xff: NaN as floats, so that what is not written shows.
pub struct Mem {
    pub ptr: u64,
    len: usize,
}

impl Mem {
    pub fn new(len: usize) -> Mem {
        let len = len.max(16);
        // SAFETY: a fresh allocation of `len` bytes; the context is bound to this thread.
        unsafe {
            let ptr = result::malloc_sync(len).expect("device memory");
            result::memset_d8_sync(ptr, 0xff, len).expect("memset");
            // It returns before it is done, and the tests' stream does not wait for it.
            result::ctx::synchronize().expect("memset");
            Mem { ptr, len }
        }
    }

    pub fn of<T: Copy>(data: &[T]) -> Mem {
        let mem = Mem::new(size_of_val(data));
        if !data.is_empty() {
            mem.write(data);
        }
        mem
    }

    pub fn write<T: Copy>(&self, data: &[T]) {
        assert!(size_of_val(data) <= self.len);
        // SAFETY: the target is as long as the source at least.
        unsafe { result::memcpy_htod_sync(self.ptr, data) }.expect("copy to the device");
    }

    pub fn read<T: Copy + Default>(&self, n: usize) -> Vec<T> {
        assert!(n * size_of::<T>() <= self.len);
        let mut out = vec![T::default(); n];
        if n > 0 {
            // SAFETY: the source is as long as the target at least.
            unsafe { result::memcpy_dtoh_sync(&mut out, self.ptr) }.expect("copy from the device");
        }
        out
    }
}

impl Drop for Mem {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed once; every test synchronises before its buffers go.
        let _ = unsafe { result::free_sync(self.ptr) };
    }
}

/// A step descriptor on the device.
pub struct Step {
    pub at: StepRef,
    _mem: [Mem; 4],
}

impl Step {
    pub fn new(rows: &[StepRow], wanted: &[u32], pages: &[u32]) -> Step {
        let header = StepHeader { rows: rows.len() as u32, wanted: wanted.len() as u32, serial: 7, slot: 1 };
        let mem = [Mem::of(&[header]), Mem::of(rows), Mem::of(wanted), Mem::of(pages)];
        let at = StepRef { header: mem[0].ptr, rows: mem[1].ptr, wanted: mem[2].ptr, pages: mem[3].ptr };
        Step { at, _mem: mem }
    }

    /// `n` rows of which nothing but the number matters.
    pub fn rows(n: usize) -> Step {
        let wanted: Vec<u32> = (0..n as u32).collect();
        Step::new(&vec![StepRow::default(); n], &wanted, &[])
    }
}

/// An activation on the device, in the layout of the ABI.
pub struct ActMem {
    pub at: Activation,
    _codes: Mem,
    steps: Mem,
    floats: Mem,
}

impl ActMem {
    pub fn new(cols: usize, ld: usize, wide: bool) -> ActMem {
        let codes = Mem::new(Activation::codes_bytes(cols, ld, wide));
        let steps = Mem::new(Activation::steps_bytes(cols, ld));
        let floats = Mem::new(Activation::floats_bytes(cols, ld));
        let at =
            Activation { codes: codes.ptr, steps: steps.ptr, floats: floats.ptr, cols: cols as u32, ld: ld as u32 };
        ActMem { at, _codes: codes, steps, floats }
    }

    /// From rows of floats, quantised by the contract.
    pub fn of(rows: &[Vec<f32>], ld: usize, width: ActivationWidth) -> (ActMem, Vec<QuantRow>) {
        let cols = rows[0].len();
        let wide = width == ActivationWidth::Int16;
        let mem = ActMem::new(cols, ld, wide);
        let quant: Vec<QuantRow> = rows.iter().map(|r| headrace_numerics::activation::quantise(r, width)).collect();
        let planes = if wide { 2 } else { 1 };
        let blocks = cols.div_ceil(32);
        let mut codes = vec![0x55u8; blocks * ld * planes * 32];
        let mut steps = vec![[0x7fc0_0000u32, 0x1234_5678]; blocks * ld];
        for (r, q) in quant.iter().enumerate() {
            for b in 0..blocks {
                let at = b * ld + r;
                let block = &q.codes[b * 32..b * 32 + 32];
                for (i, &c) in block.iter().enumerate() {
                    if wide {
                        let (hi, lo) = headrace_numerics::activation::split(c);
                        codes[at * 64 + i] = hi as u8;
                        codes[at * 64 + 32 + i] = lo as u8;
                    } else {
                        codes[at * 32 + i] = c as i8 as u8;
                    }
                }
                let sum: i32 = block.iter().map(|&c| i32::from(c)).sum();
                steps[at] = [q.d[b].to_bits(), sum as u32];
            }
        }
        mem._codes.write(&codes);
        mem.steps.write(&steps);
        let flat: Vec<f32> = rows.concat();
        mem.floats.write(&flat);
        (mem, quant)
    }

    /// Codes, steps and sums of row `r`, as the device holds them.
    pub fn row(&self, r: usize, wide: bool) -> (Vec<i16>, Vec<f32>, Vec<i32>) {
        let (cols, ld) = (self.at.cols as usize, self.at.ld as usize);
        let blocks = cols.div_ceil(32);
        let planes = if wide { 2 } else { 1 };
        let codes: Vec<u8> = self._codes.read(blocks * ld * planes * 32);
        let steps: Vec<[u32; 2]> = self.steps.read(blocks * ld);
        let mut out = (Vec::new(), Vec::new(), Vec::new());
        for b in 0..blocks {
            let at = b * ld + r;
            for i in 0..32 {
                out.0.push(if wide {
                    256 * i16::from(codes[at * 64 + i] as i8) + i16::from(codes[at * 64 + 32 + i] as i8)
                } else {
                    i16::from(codes[at * 32 + i] as i8)
                });
            }
            out.1.push(f32::from_bits(steps[at][0]));
            out.2.push(steps[at][1] as i32);
        }
        out
    }

    pub fn floats(&self, r: usize) -> Vec<f32> {
        let cols = self.at.cols as usize;
        self.floats.read::<f32>(cols * (r + 1))[r * cols..].to_vec()
    }
}

/// Every format that a loader can produce.
pub fn formats() -> Vec<Format> {
    if let Some(named) = crate::bench::named_formats() {
        return named;
    }
    use headrace_numerics::format::{Nbits, Planes, ScaleType, ZeroPoint};
    let mut all = vec![
        Format::F32,
        Format::F16,
        Format::BF16,
        Format::Q4_0,
        Format::Q4_1,
        Format::Q5_0,
        Format::Q5_1,
        Format::Q8_0,
        Format::Q4_K,
        Format::Q5_K,
        Format::Q6_K,
        Format::Planes(Planes::Q4_1),
        Format::Planes(Planes::Q4_K),
        Format::Planes(Planes::Q6_K),
    ];
    for bits in [4, 8] {
        for block in [16, 32, 64, 128, 256] {
            for scale in [ScaleType::F16, ScaleType::F32] {
                for zero in [ZeroPoint::Midpoint, ZeroPoint::PerBlock, ZeroPoint::TwosComplement] {
                    all.push(Format::Nbits(Nbits { bits, block, scale, zero }));
                }
            }
        }
    }
    all
}

/// Equal bits, or both NaN: payloads of NaN are not part of the contract (a non-finite logit is an error).
pub fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// Fails with the first difference.
pub fn assert_same(got: &[f32], want: &[f32], what: &dyn Fn() -> String) {
    assert_eq!(got.len(), want.len(), "{}", what());
    let bad = (0..got.len()).filter(|&i| !same(got[i], want[i])).count();
    let i = (0..got.len()).find(|&i| !same(got[i], want[i])).unwrap_or(0);
    assert!(
        bad == 0,
        "{}: {bad} of {} differ, first at {i}: {:?} ({:08x}), not {:?} ({:08x})",
        what(),
        got.len(),
        got[i],
        got[i].to_bits(),
        want[i],
        want[i].to_bits()
    );
}

/// Values as activations have them.
pub fn ordinary(rng: &mut ChaCha8Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| (rng.random::<f32>() - 0.5) * 4.0).collect()
}

/// Blocks of every kind: zero, denormal, huge, tiny, with an infinity or a NaN if `broken`.
pub fn extreme(rng: &mut ChaCha8Rng, n: usize, broken: bool) -> Vec<f32> {
    let mut x = ordinary(rng, n);
    for block in x.chunks_mut(32) {
        let scale = match rng.random_range(0..8) {
            0 => 0.0,
            1 => 1e-42,
            2 => 1e-36,
            3 => 8e37,
            4 => 1e30,
            5 => -0.0,
            _ => 1.0,
        };
        block.iter_mut().for_each(|v| *v *= scale);
        if broken && rng.random_range(0..6) == 0 {
            let i = rng.random_range(0..block.len());
            block[i] = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN][rng.random_range(0..3)];
        }
    }
    x
}

/// True if only a part of the cases is asked for (`--quick`): under a sanitizer each takes long.
pub fn quick() -> bool {
    std::env::args().any(|a| a == "--quick")
}

/// Runs `test` on every item, also after failures, so that one run shows everything that is wrong.
pub fn each<T>(items: impl IntoIterator<Item = T>, mut test: impl FnMut(T)) {
    let mut failed = 0;
    for item in items {
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(item)));
        failed += usize::from(done.is_err());
    }
    assert_eq!(failed, 0, "parts that failed");
}
