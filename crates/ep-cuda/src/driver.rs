//! The NVIDIA driver, loaded at run time: is it there, is it new enough, which cards can run the kernels.

use std::ffi::CStr;
use std::fmt;

use cudarc::driver::sys;

/// Oldest driver API that is accepted, as `cuDriverGetVersion` counts: 1000 * major + 10 * minor.
pub const OLDEST_DRIVER: i32 = 12_000;

/// Lowest compute capability that the kernels are built for.
pub const LOWEST_CAPABILITY: (i32, i32) = (7, 5);

/// A call of the driver that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {text}{}", if *code == 0 { String::new() } else { format!(" (CUDA error {code})") })]
pub struct CudaError {
    /// What was called, and on what.
    pub call: String,
    /// The driver's code; 0 where the driver wasn't asked.
    pub code: u32,
    /// The driver's name of the code.
    pub text: String,
}

impl CudaError {
    /// True if the driver had no memory left.
    pub fn is_out_of_memory(&self) -> bool {
        self.code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32
    }
}

/// Why no CUDA device can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverProblem {
    /// There is no driver.
    #[error("no NVIDIA driver found: {library} can't be loaded; the device \"cpu\" needs none")]
    Missing {
        /// File name of the library.
        library: &'static str,
    },
    /// The driver is older than the device code needs.
    #[error(
        "the NVIDIA driver is too old: it supports CUDA {}.{}, {}.{} is needed",
        version / 1000, version % 1000 / 10, OLDEST_DRIVER / 1000, OLDEST_DRIVER % 1000 / 10
    )]
    TooOld {
        /// What the driver reports.
        version: i32,
    },
    /// The driver is there and sees no card.
    #[error("the NVIDIA driver sees no card")]
    NoCard,
    /// The machine has no card of that number.
    #[error("there is no device cuda:{ordinal}; the driver sees {count} card(s)")]
    NoSuchCard {
        /// Number asked for.
        ordinal: usize,
        /// Cards there are.
        count: usize,
    },
    /// The card is older than the kernels need.
    #[error(
        "{name} has compute capability {}.{}, {}.{} is needed",
        capability.0, capability.1, LOWEST_CAPABILITY.0, LOWEST_CAPABILITY.1
    )]
    CardTooOld {
        /// The card.
        name: String,
        /// Its compute capability.
        capability: (i32, i32),
    },
    /// The card's addresses can't be reserved apart from its memory.
    #[error(
        "{name} doesn't offer virtual memory management, by which a limit is kept; without one, placement = unmanaged runs there"
    )]
    NoVirtualMemory {
        /// The card.
        name: String,
    },
    /// The driver failed.
    #[error(transparent)]
    Call(#[from] CudaError),
}

/// Turns a driver's result into ours.
pub(crate) fn check(result: sys::CUresult, call: impl fmt::Display) -> Result<(), CudaError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = std::ptr::null();
    // SAFETY: `name` receives a pointer to a constant string, or null for a code that the driver doesn't know.
    let known = unsafe { sys::cuGetErrorName(result, &mut name) };
    let text = match known == sys::CUresult::CUDA_SUCCESS && !name.is_null() {
        // SAFETY: the driver gave a constant, null-terminated string.
        true => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
        false => "unknown error".to_string(),
    };
    Err(CudaError { call: call.to_string(), code: result as u32, text })
}

/// Logs a failure where nobody can be told: in `Drop`.
pub(crate) fn log_failure(result: sys::CUresult, call: &str) {
    if let Err(error) = check(result, call) {
        log_error(&error);
    }
}

/// Logs an error where nobody can be told.
pub(crate) fn log_error(error: &CudaError) {
    // A process that ends may have lost its driver already; that is no news.
    if error.code != sys::CUresult::CUDA_ERROR_DEINITIALIZED as u32 {
        log::error!("{error}");
    }
}

fn check_version(version: i32) -> Result<(), DriverProblem> {
    if version < OLDEST_DRIVER { Err(DriverProblem::TooOld { version }) } else { Ok(()) }
}

fn check_capability(name: &str, capability: (i32, i32)) -> Result<(), DriverProblem> {
    if capability < LOWEST_CAPABILITY {
        return Err(DriverProblem::CardTooOld { name: name.to_string(), capability });
    }
    Ok(())
}

/// Name of the driver's library on this platform.
pub const LIBRARY: &str = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };

/// A driver that is there, initialised and new enough. Everything that calls it starts from one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Driver {
    /// Version of the driver API: 1000 * major + 10 * minor.
    pub version: i32,
}

/// One card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Number of the device: `cuda:N`.
    pub ordinal: usize,
    /// The card's name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Bytes of device memory.
    pub total_bytes: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Address on the bus, such as `0000:3b:00.0`, by which other tools know the card.
    pub bus_id: String,
    /// True if a read-only mapping of a file can be registered.
    pub read_only_registration: bool,
    /// True if addresses can be reserved apart from memory, and memory be mapped there.
    pub virtual_memory: bool,
    pub(crate) device: sys::CUdevice,
}

impl Card {
    /// Refuses a card whose addresses can't be reserved apart from its memory.
    ///
    /// # Errors
    /// [`DriverProblem::NoVirtualMemory`].
    pub fn require_virtual_memory(&self) -> Result<(), DriverProblem> {
        match self.virtual_memory {
            true => Ok(()),
            false => Err(DriverProblem::NoVirtualMemory { name: self.name.clone() }),
        }
    }
}

impl Driver {
    /// Loads and initialises the driver. The wrapper's own loader panics where there is none, so this looks first.
    ///
    /// # Errors
    /// [`DriverProblem::Missing`], [`DriverProblem::TooOld`], [`DriverProblem::Call`].
    pub fn load() -> Result<Driver, DriverProblem> {
        // SAFETY: looking for the library runs its initialisers; the vendor's driver has none that do harm.
        if !unsafe { sys::is_culib_present() } {
            return Err(DriverProblem::Missing { library: LIBRARY });
        }
        let mut version = 0;
        // SAFETY: the call writes one integer, needs no initialisation, and exists in every driver.
        check(unsafe { sys::cuDriverGetVersion(&mut version) }, "cuDriverGetVersion")?;
        // Before anything else: an entry that an old driver lacks would be missing later.
        check_version(version)?;
        // SAFETY: 0 is the only flag there is; repeated calls do nothing.
        match unsafe { sys::cuInit(0) } {
            sys::CUresult::CUDA_ERROR_NO_DEVICE => return Err(DriverProblem::NoCard),
            result => check(result, "cuInit")?,
        }
        Ok(Driver { version })
    }

    /// Number of cards.
    ///
    /// # Errors
    /// [`DriverProblem::Call`].
    pub fn count(&self) -> Result<usize, DriverProblem> {
        let mut count = 0;
        // SAFETY: the driver is initialised; the call writes one integer.
        check(unsafe { sys::cuDeviceGetCount(&mut count) }, "cuDeviceGetCount")?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The card of that number, whether or not the kernels can run on it.
    ///
    /// # Errors
    /// [`DriverProblem::NoSuchCard`], [`DriverProblem::Call`].
    pub fn card(&self, ordinal: usize) -> Result<Card, DriverProblem> {
        use sys::CUdevice_attribute as Attribute;
        let count = self.count()?;
        if count == 0 {
            return Err(DriverProblem::NoCard);
        }
        let number = i32::try_from(ordinal).ok().filter(|_| ordinal < count);
        let number = number.ok_or(DriverProblem::NoSuchCard { ordinal, count })?;
        let mut device = 0;
        // SAFETY: the number is one of the driver's.
        check(unsafe { sys::cuDeviceGet(&mut device, number) }, "cuDeviceGet")?;
        let attribute = |attribute: Attribute| -> Result<i32, CudaError> {
            let mut value = 0;
            // SAFETY: the device is valid; the call writes one integer.
            check(unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) }, "cuDeviceGetAttribute")?;
            Ok(value)
        };
        let mut text = [0; 256];
        // SAFETY: the call writes at most 256 bytes, a terminating null included.
        check(unsafe { sys::cuDeviceGetName(text.as_mut_ptr(), text.len() as i32, device) }, "cuDeviceGetName")?;
        let name = c_text(&text);
        let mut text = [0; 32];
        let length = text.len() as i32;
        // SAFETY: as above, for 32 bytes.
        check(unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), length, device) }, "cuDeviceGetPCIBusId")?;
        let bus_id = c_text(&text);
        let mut total = 0;
        // SAFETY: the device is valid; the call writes one integer.
        check(unsafe { sys::cuDeviceTotalMem_v2(&mut total, device) }, "cuDeviceTotalMem")?;
        Ok(Card {
            ordinal,
            name,
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            total_bytes: total as u64,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs(),
            bus_id,
            read_only_registration: attribute(Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED)? != 0,
            virtual_memory: attribute(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? != 0,
            device,
        })
    }

    /// The card of that number, if the kernels can run on it.
    ///
    /// # Errors
    /// As [`Driver::card`], and [`DriverProblem::CardTooOld`].
    pub fn usable_card(&self, ordinal: usize) -> Result<Card, DriverProblem> {
        let card = self.card(ordinal)?;
        check_capability(&card.name, card.capability)?;
        Ok(card)
    }
}

fn c_text(bytes: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = bytes.iter().take_while(|&&b| b != 0).map(|&b| b as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_is_there_or_a_message_says_why_not() {
        match Driver::load() {
            // With a driver there is no such message; what it says of itself must make sense.
            Ok(driver) => assert!(driver.version >= OLDEST_DRIVER, "{}", driver.version),
            Err(problem @ DriverProblem::Missing { .. }) => {
                assert!(problem.to_string().contains(LIBRARY), "{problem}");
            }
            Err(problem) => assert!(!problem.to_string().is_empty()),
        }
    }

    #[test]
    fn old_drivers_and_cards_are_named() {
        assert_eq!(check_version(OLDEST_DRIVER), Ok(()));
        let old = check_version(11_080).unwrap_err().to_string();
        assert!(old.contains("CUDA 11.8, 12.0 is needed"), "{old}");
        assert_eq!(check_capability("any", (7, 5)), Ok(()));
        assert_eq!(check_capability("any", (10, 0)), Ok(()));
        let old = check_capability("Old Card", (6, 1)).unwrap_err().to_string();
        assert_eq!(old, "Old Card has compute capability 6.1, 7.5 is needed");
        assert!(check_capability("any", (7, 2)).is_err());
    }
}
