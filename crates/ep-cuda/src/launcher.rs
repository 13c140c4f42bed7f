//! The one door from bound arguments to kernels.

use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::format::Format;

use crate::bind::Launch;
use crate::chain::Area;
use crate::launch::{ChainShape, HeadShape};
use crate::stream::Stream;

/// Something that launches kernels on a stream.
pub trait Launcher: Send {
    /// The kernels' name in [`headrace_provider::DeviceInfo`], such as `sm_90`.
    fn name(&self) -> String;

    /// Loads what launches of these formats, this width of activations and such heads need, so that nothing is loaded in a
    /// capture.
    fn prepare(&mut self, width: ActivationWidth, formats: &[Format], heads: Option<&HeadShape>) -> Result<(), String>;

    /// How a chain with weights of `format` would be launched; `None` if it has to be launched task by task.
    fn chain_shape(&self, _width: ActivationWidth, _format: Format, _area: &Area) -> Option<ChainShape> {
        None
    }

    /// Queues one launch. Allocates nothing on the device.
    fn launch(&self, stream: &Stream, launch: &Launch, how: How) -> Result<(), String>;
}

/// How a launch is queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct How {
    /// Rows that it is sized for.
    pub rows: usize,
    /// Width of quantised activations.
    pub width: ActivationWidth,
    /// True if it follows a launch on the same stream and reads resident weights at most: it may begin to read them while
    /// the launch before still runs.
    pub overlap: bool,
    /// True if everything it reads lies in device memory: it may ask for bytes to come to the second-level cache early.
    pub ask_ahead: bool,
}
