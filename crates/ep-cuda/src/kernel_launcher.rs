//! The crate's own kernels behind the launcher's door.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::CudaContext;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::format::Format;

use crate::bind::Launch;
use crate::chain::Area;
use crate::context::Context;
use crate::driver::{CudaError, DriverProblem};
use crate::launch::{ChainShape, HeadShape, Kernels, LaunchError, Queue, Source};
use crate::launcher::{How, Launcher};
use crate::stream::Stream;

/// The kernels of one card, by width of activations.
pub struct KernelLauncher {
    context: Arc<CudaContext>,
    kernels: HashMap<ActivationKey, Kernels>,
    capability: u32,
}

/// [`ActivationWidth`] as a key.
type ActivationKey = bool;

fn key(width: ActivationWidth) -> ActivationKey {
    width == ActivationWidth::Int16
}

/// Kernels that the driver has kept load faster than this; if it takes longer, it has compiled them.
const COMPILED: Duration = Duration::from_secs(1);

impl KernelLauncher {
    /// Loads the kernels that every model needs, for 16-bit activations.
    ///
    /// # Errors
    /// [`DriverProblem::Call`]: the driver is too old for the device code, or the crate has none.
    pub fn open(context: &Arc<Context>) -> Result<Box<dyn Launcher>, DriverProblem> {
        let problem = |what: String| {
            DriverProblem::Call(CudaError { call: "loading the device code".into(), code: 0, text: what })
        };
        let _current = context.bind()?;
        let ordinal = context.card().ordinal;
        let shared = CudaContext::new(ordinal).map_err(|e| problem(e.to_string()))?;
        let (major, minor) = context.card().capability;
        let capability = (major * 10 + minor).unsigned_abs();
        let mut launcher = KernelLauncher { context: shared, kernels: HashMap::new(), capability };
        launcher.prepare(ActivationWidth::Int16, &[], None).map_err(problem)?;
        Ok(Box::new(launcher))
    }
}

impl Launcher for KernelLauncher {
    fn name(&self) -> String {
        format!("sm_{}", self.capability)
    }

    fn prepare(&mut self, width: ActivationWidth, formats: &[Format], heads: Option<&HeadShape>) -> Result<(), String> {
        let since = Instant::now();
        let kernels = match self.kernels.remove(&key(width)) {
            Some(kernels) => Ok(kernels),
            None => Kernels::new(&self.context, width),
        };
        let mut kernels = kernels.map_err(|e| e.to_string())?;
        let prepared = formats.iter().try_for_each(|&format| kernels.prepare(format));
        let prepared = prepared.and_then(|()| heads.map_or(Ok(()), |heads| kernels.prepare_attention(heads)));
        self.kernels.insert(key(width), kernels);
        if since.elapsed() > COMPILED {
            let seconds = since.elapsed().as_secs_f64();
            log::info!(
                "the driver took {seconds:.0} s to compile kernels for this card; it keeps them, so that later loads don't wait"
            );
        }
        prepared.map_err(|e| e.to_string())
    }

    fn chain_shape(&self, width: ActivationWidth, format: Format, area: &Area) -> Option<ChainShape> {
        self.kernels.get(&key(width))?.chain_shape(format, area)
    }

    fn launch(&self, stream: &Stream, launch: &Launch, how: How) -> Result<(), String> {
        let How { rows, width, overlap, ask_ahead } = how;
        let kernels = self.kernels.get(&key(width)).ok_or("the kernels were not loaded")?;
        let queue = Queue { stream: stream.raw(), overlap, ask_ahead };
        // SAFETY: the addresses are the arena's and the program's own; what they point to is mapped whenever the launch
        // runs, which is checked before every replay, and unmapping waits for the stream.
        let launched: Result<(), LaunchError> = unsafe {
            match launch {
                Launch::Embed(format, args) => kernels.embed(queue, *format, args, rows),
                Launch::Norm(args) => kernels.activation(queue, Source::Norm, args, rows),
                Launch::Quantise(args) => kernels.activation(queue, Source::Plain, args, rows),
                Launch::Swiglu(args) => kernels.activation(queue, Source::Swiglu, args, rows),
                Launch::Linear(format, args) => {
                    let count = (args.segments as usize).min(args.segment.len());
                    kernels.linear(queue, *format, args, &args.segment[..count], rows)
                }
                Launch::Rope(args) => kernels.rope_append(queue, args, rows),
                Launch::Attention(args) => kernels.attention(queue, kernels.attention_form(args, rows), args, rows),
                Launch::Argmax(args) => kernels.argmax(queue, args, rows),
                Launch::Chain(format, shape, args) => kernels.chain(queue, *format, shape, args),
                Launch::Report(args) => kernels.report(queue, args),
            }
        };
        launched.map_err(|e| e.to_string())
    }
}
