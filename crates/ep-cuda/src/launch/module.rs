//! Loaded device code: the modules of one context, and the functions in them.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::sys::{CUdevice_attribute_enum as Attribute, CUfunction, CUfunction_attribute_enum, CUmodule};
use cudarc::driver::{CudaContext, result};
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::format::Format;

use super::LaunchError;
use super::activation::ActivationKernels;
use super::attention::AttentionKernels;
use super::linear::{FormatKernels, class_of};
use crate::ptx;

/// Kernels of one device, for one width of activations.
#[derive(Debug)]
pub struct Kernels {
    pub(super) activation: ActivationKernels,
    pub(super) attention: AttentionKernels,
    pub(super) formats: HashMap<&'static str, FormatKernels>,
    /// Width of quantised activations.
    pub(super) width: ActivationWidth,
    /// Multiprocessors.
    pub(super) processors: usize,
    /// Bytes of shared memory that one block may have.
    pub(super) shared_most: usize,
    /// Bytes of shared memory of a multiprocessor.
    pub(super) shared_all: usize,
    /// Ten times major plus minor compute capability.
    pub(super) capability: u32,
    /// True if all blocks of a launch can be made to run at once.
    pub(super) cooperative: bool,
    pub(super) loader: Loader,
}

/// Loads kernels, each as a module of its own, and unloads them when it is dropped. The driver compiles what it is given, and
/// keeps the result for the next process.
#[derive(Debug)]
pub(super) struct Loader {
    context: Arc<CudaContext>,
    target: &'static ptx::Target,
    modules: Vec<CUmodule>,
    shared_most: usize,
}

// SAFETY: module handles may be used from any thread that has bound the context, as every use here does.
unsafe impl Send for Loader {}

impl Loader {
    /// The function `name` of module `module`, allowed all the shared memory that the device gives a block; `None` if the
    /// target has no such module.
    pub(super) fn function(&mut self, module: &str, name: &str) -> Result<CUfunction, LaunchError> {
        let unknown = || LaunchError::Unsupported(format!("no kernel {module}/{name} for this device"));
        let source = self.target.modules.iter().find(|m| m.name == module).ok_or_else(unknown)?;
        let text = source.entry(name).ok_or_else(unknown)?;
        self.context.bind_to_thread()?;
        // SAFETY: the image is PTX text that ends in zero; the context is bound.
        let handle = unsafe { result::module::load_data(text.as_ptr().cast()) }?;
        self.modules.push(handle);
        let c_name = CString::new(name).map_err(|_| unknown())?;
        // SAFETY: the module is loaded and lives as long as `self`.
        unsafe {
            let function = result::module::get_function(handle, c_name)?;
            let fixed = result::function::get_function_attribute(
                function,
                CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            )?;
            result::function::set_function_attribute(
                function,
                CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                i32::try_from(self.shared_most).unwrap_or(i32::MAX) - fixed,
            )?;
            // Kernels that overlap need the same division of cache and shared memory: a multiprocessor changes it only when
            // nothing runs there. The rest of the linear kernels live on the cache.
            if !module.starts_with("linear.") && !module.starts_with("linear_mma.") {
                result::function::set_function_attribute(
                    function,
                    CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                    100,
                )?;
            }
            Ok(function)
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_err() {
            return;
        }
        for &handle in &self.modules {
            // SAFETY: loaded by `function`, unloaded once; nothing launched is pending, by `Kernels`' contract.
            if let Err(error) = unsafe { result::module::unload(handle) } {
                log::warn!("a CUDA module was not unloaded: {error}");
            }
        }
    }
}

impl Kernels {
    /// Loads the kernels that every model needs. The context outlives what is launched.
    ///
    /// # Errors
    /// [`LaunchError::Unsupported`] if the device is older than every target, or the crate has no device code.
    pub fn new(context: &Arc<CudaContext>, width: ActivationWidth) -> Result<Self, LaunchError> {
        let get = |attribute| -> Result<usize, LaunchError> {
            Ok(usize::try_from(context.attribute(attribute)?).unwrap_or_default())
        };
        let major = get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32;
        let minor = get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32;
        let target = ptx::target_for(major, minor).ok_or_else(|| {
            LaunchError::Unsupported(format!("compute capability {major}.{minor}; 7.5 or newer is needed"))
        })?;
        let shared_most = get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let mut loader = Loader { context: context.clone(), target, modules: Vec::new(), shared_most };
        Ok(Kernels {
            activation: ActivationKernels::load(&mut loader, width)?,
            attention: AttentionKernels::default(),
            formats: HashMap::new(),
            width,
            processors: get(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_most,
            shared_all: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
            capability: major * 10 + minor,
            cooperative: get(Attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH)? != 0,
            loader,
        })
    }

    /// Loads the kernels of a weight format, if they are not loaded yet.
    pub fn prepare(&mut self, format: Format) -> Result<(), LaunchError> {
        let class = class_of(format);
        if !self.formats.contains_key(class) {
            let kernels = FormatKernels::load(&mut self.loader, format, self.width, self.capability)?;
            self.formats.insert(class, kernels);
        }
        Ok(())
    }

    /// Compute capability of the device: ten times the major plus the minor version.
    pub fn capability(&self) -> u32 {
        self.capability
    }

    /// Width of quantised activations.
    pub fn width(&self) -> ActivationWidth {
        self.width
    }

    /// Multiprocessors of the device.
    pub fn processors(&self) -> usize {
        self.processors
    }

    pub(super) fn format(&self, format: Format) -> Result<&FormatKernels, LaunchError> {
        self.formats
            .get(class_of(format))
            .ok_or_else(|| LaunchError::Unsupported(format!("kernels of {} were not loaded", format.name())))
    }
}
