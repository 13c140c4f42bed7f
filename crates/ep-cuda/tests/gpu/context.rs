//! What a provider leaves as it found it: the caller's current context, and the stacks of the primary context.

use cudarc::driver::sys;
use headrace_ep_cuda::CudaProvider;
use headrace_ep_cuda::context::Context;
use headrace_ep_cuda::driver::Driver;
use headrace_provider::{Provider, RangeKind};

use crate::device::Gpu;

/// The argument with which this program runs [`alone`] in a process of its own.
pub const ALONE: &str = "--context-alone";

fn ok(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}

fn current() -> sys::CUcontext {
    let mut context = std::ptr::null_mut();
    // SAFETY: the call writes one handle.
    ok(unsafe { sys::cuCtxGetCurrent(&mut context) });
    context
}

/// Opens a provider, has it map, write and read memory, and closes it.
fn use_a_provider() {
    let mut provider = CudaProvider::open(0).expect("a card");
    let mapped = provider.resize(RangeKind::Staging, 64 << 20).expect("memory");
    let mut bytes = [1u8; 64];
    provider.write(RangeKind::Staging, 0, &[7; 64]).expect("written");
    provider.read(RangeKind::Staging, 0, &mut bytes).expect("read");
    assert_eq!((bytes, mapped >= 64 << 20), ([7; 64], true));
    provider.reads_host_memory().expect("pinned memory");
    provider.report();
}

/// With nothing current, and with a context of the caller's own, what was current is so afterwards.
pub fn caller_s_context(gpu: &Gpu) {
    let before = current();
    // SAFETY: nothing is a context to be current.
    ok(unsafe { sys::cuCtxSetCurrent(std::ptr::null_mut()) });
    use_a_provider();
    assert!(current().is_null());
    let mut own = std::ptr::null_mut();
    // SAFETY: the device is the first card's; the context is destroyed below. It becomes current.
    ok(unsafe { sys::cuCtxCreate_v2(&mut own, 0, gpu.context.cu_device()) });
    use_a_provider();
    assert_eq!(current(), own);
    let open = Context::open(0).expect("a context");
    open.memory_info().expect("memory");
    assert_eq!(current(), own);
    drop(open);
    assert_eq!(current(), own);
    // SAFETY: made above, used by nothing.
    ok(unsafe { sys::cuCtxDestroy_v2(own) });
    // SAFETY: it was current before.
    ok(unsafe { sys::cuCtxSetCurrent(before) });
}

/// Bytes of stack in the primary context, as another library of the process finds them.
fn stacks(device: sys::CUdevice) -> usize {
    let (mut context, mut bytes) = (std::ptr::null_mut(), 0);
    // SAFETY: the device is valid; what is retained is released, and what is pushed is popped.
    unsafe {
        ok(sys::cuDevicePrimaryCtxRetain(&mut context, device));
        ok(sys::cuCtxPushCurrent_v2(context));
        ok(sys::cuCtxGetLimit(&mut bytes, sys::CUlimit::CU_LIMIT_STACK_SIZE));
        ok(sys::cuCtxPopCurrent_v2(&mut context));
        ok(sys::cuDevicePrimaryCtxRelease_v2(device));
    }
    bytes
}

/// In a process in which nothing else has opened the card: once the provider is closed, a library that has opened the card
/// meanwhile finds the stacks that a new context has.
pub fn alone() {
    Driver::load().expect("a driver");
    let mut device = 0;
    // SAFETY: the call writes one number.
    ok(unsafe { sys::cuDeviceGet(&mut device, 0) });
    let found = stacks(device);
    let provider = CudaProvider::open(0).expect("a card");
    let during = stacks(device);
    let mut kept = std::ptr::null_mut();
    // SAFETY: released below.
    ok(unsafe { sys::cuDevicePrimaryCtxRetain(&mut kept, device) });
    drop(provider);
    assert!(current().is_null());
    assert_eq!((stacks(device), during < found), (found, true), "{during} while it was open");
    // SAFETY: retained above.
    ok(unsafe { sys::cuDevicePrimaryCtxRelease_v2(device) });
}

/// [`alone`], in a process of its own.
pub fn stacks_as_found(_: &Gpu) {
    let itself = std::env::current_exe().expect("this program");
    let status = std::process::Command::new(itself).arg(ALONE).status().expect("a child");
    assert!(status.success(), "{status}");
}
