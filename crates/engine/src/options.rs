//! What a caller may choose: loading options and generation options, with their defaults and checks.

use headrace_kv::KvLayout;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::elementwise::KvDtype;

use crate::error::{EngineError, Result};
use crate::mode::{PlacementMode, default_headroom, default_host_mapped_budget, platform};
use crate::residency::PolicyKind;

/// Bytes that the logits of one step may take beyond one row a sequence. A prompt's rows need one row of logits; more
/// are only for [`crate::Engine::logits`].
const LOGITS_BYTES: usize = 8 << 20;

/// Most tokens of a draft.
const MAX_DRAFT: usize = 256;

/// Which device computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first NVIDIA card that can be used; without one, the CPU, and the reason is logged and in the stats.
    #[default]
    Auto,
    /// The host's cores, weights read from the file's mapping.
    Cpu,
    /// The host's cores with a memory of their own that is mapped, streamed into and limited as a card's is: for tests, and to
    /// see what a limit does without a card.
    HostDevice,
    /// The NVIDIA card of this number.
    Cuda(usize),
}

/// Options of [`crate::Engine::load`].
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    /// Device.
    pub device: DeviceChoice,
    /// Bytes that everything on the device may take; `None` for no limit.
    pub vram_limit: Option<u64>,
    /// Bytes of the host's memory that devices may page-lock, all engines of this process together; `None` for what is in force, else
    /// 80% of what the machine has, or its control group.
    pub host_limit: Option<u64>,
    /// Where weights are read from.
    pub placement: PlacementMode,
    /// Bytes of weights that a step may read in place; `None` for the platform's default. Only for modes that may read in place;
    /// 0 keeps `auto` from it.
    pub host_mapped_budget: Option<u64>,
    /// Bytes that stay free below the limit; `None` for the platform's default.
    pub headroom: Option<u64>,
    /// Bytes of a piece of weights, the unit of placement and copying; `None` for the device's own choice.
    pub piece_bytes: Option<u64>,
    /// Slots of the staging ring.
    pub ring_slots: u32,
    /// Most positions of a sequence; `None` for the model's own limit.
    pub max_context: Option<usize>,
    /// Most sequences that are in work at once.
    pub max_batch: usize,
    /// Token rows of a prefill step; larger is faster and takes more workspace. Bits don't depend on it.
    pub prefill_chunk: usize,
    /// Steps that may be in flight at once: the token of one is taken while the next one runs. 1 waits for every token before
    /// the next step is submitted. A device may allow fewer. Tokens don't depend on it. `None` decides at every step, by whether
    /// a weight is cold then: [`EngineOptions::in_flight`].
    pub steps_in_flight: Option<usize>,
    /// Width of quantised activations.
    pub activations: ActivationWidth,
    /// Storage type of keys and values.
    pub kv_dtype: KvDtype,
    /// Order of entries in a KV page. Tokens don't depend on it.
    pub kv_layout: KvLayout,
    /// Threads that compute on the host; `None` for all cores this process may use.
    pub threads: Option<usize>,
    /// A residency policy that decides at every access what stays; `None` for the static schedule, which is faster.
    pub policy: Option<PolicyKind>,
    /// Names of tensors, or patterns with `*` and `?`, that a policy never evicts.
    pub pinned: Vec<String>,
    /// Tensors of at most so many bytes are pinned too.
    pub pin_threshold: u64,
    /// Bytes of weights that a policy may keep; `None` for as many as the static schedule keeps under the same limit, which
    /// is also the most.
    pub policy_budget: Option<u64>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            device: DeviceChoice::Auto,
            vram_limit: None,
            host_limit: None,
            placement: PlacementMode::default(),
            host_mapped_budget: None,
            headroom: None,
            piece_bytes: None,
            ring_slots: 4,
            max_context: None,
            max_batch: 8,
            prefill_chunk: 256,
            steps_in_flight: None,
            activations: ActivationWidth::default(),
            kv_dtype: KvDtype::default(),
            kv_layout: KvLayout::default(),
            threads: None,
            policy: None,
            pinned: Vec::new(),
            pin_threshold: 0,
            policy_budget: None,
        }
    }
}

impl EngineOptions {
    /// Most token rows of a step.
    pub fn max_rows(&self) -> usize {
        self.prefill_chunk.max(self.max_batch)
    }

    /// Most rows of a step whose logits are kept: what fits 8 MiB, and at least one a sequence.
    pub fn max_wanted(&self, vocab: usize) -> usize {
        (LOGITS_BYTES / (4 * vocab.max(1))).clamp(self.max_batch, self.max_rows())
    }

    /// Steps that may be in flight while a step reads `cold` weights over the link, or none: what was asked for, or else 1 and 2.
    /// Never more for cold weights than for none.
    ///
    /// A second step hides the turn of the host, and of a caller, between two: by itself at most 0.5% of a step on an H200.
    /// Behind a step that a stop token ends it is for nothing, which over cold weights is a whole pass over the link.
    pub fn in_flight(&self, cold: bool) -> usize {
        self.steps_in_flight.unwrap_or(if cold { 1 } else { 2 })
    }

    /// Bytes of weights that a step may read in place; in `auto`, if it chooses to, and never under a policy.
    pub fn host_mapped_bytes(&self) -> u64 {
        match self.placement.may_read_in_place() && self.policy.is_none() {
            true => self.host_mapped_budget.unwrap_or_else(|| default_host_mapped_budget(platform())),
            false => 0,
        }
    }

    /// Bytes of a card that stay free below the limit; of the host device, only what was asked for.
    pub fn headroom_bytes(&self) -> u64 {
        match (self.headroom, self.placement, self.device) {
            (Some(bytes), ..) => bytes,
            (None, PlacementMode::Unmanaged, _) | (None, _, DeviceChoice::HostDevice | DeviceChoice::Cpu) => 0,
            (None, ..) => default_headroom(platform()),
        }
    }

    fn check_placement(&self) -> Result<()> {
        let mode = self.placement;
        let refuse = |name, value: &dyn ToString, what: &str| Err(EngineError::argument(name, value.to_string(), what));
        if let Some(bytes) = self.host_mapped_budget.filter(|_| !mode.may_read_in_place()) {
            let what = "only placement = auto, zero-copy and hybrid may read weights in place";
            return refuse("host_mapped_budget", &bytes, what);
        }
        if let Some(bytes) = self.host_mapped_budget.filter(|_| self.policy.is_some()) {
            return refuse(
                "host_mapped_budget",
                &bytes,
                "under a policy nothing is read in place: give one or the other",
            );
        }
        if self.policy.is_some() && !matches!(mode, PlacementMode::Auto | PlacementMode::Stream) {
            return refuse("placement", &mode.name(), "a policy decides placement itself: leave it at auto or stream");
        }
        if mode == PlacementMode::Unmanaged {
            if let Some(limit) = self.vram_limit {
                return refuse("vram_limit", &limit, "placement = unmanaged enforces no limit: give one or the other");
            }
            if let Some(bytes) = self.headroom {
                return refuse(
                    "headroom",
                    &bytes,
                    "placement = unmanaged has no limit below which to leave anything free",
                );
            }
        }
        Ok(())
    }

    /// Checks every option that doesn't need the model.
    pub fn check(&self) -> Result<()> {
        let positive = |name, value: usize| match value {
            0 => Err(EngineError::argument(name, value, "must be at least 1")),
            _ => Ok(()),
        };
        positive("max_batch", self.max_batch)?;
        positive("prefill_chunk", self.prefill_chunk)?;
        positive("max_context", self.max_context.unwrap_or(1))?;
        positive("threads", self.threads.unwrap_or(1))?;
        let most = |name, value: usize, most: usize| match value > most {
            true => Err(EngineError::argument(name, value, format!("must be at most {most}"))),
            false => Ok(()),
        };
        if !(2..=64).contains(&self.ring_slots) {
            return Err(EngineError::argument("ring_slots", self.ring_slots, "must be 2 to 64"));
        }
        if let Some(steps) = self.steps_in_flight.filter(|steps| !(1..=8).contains(steps)) {
            return Err(EngineError::argument("steps_in_flight", steps, "must be 1 to 8"));
        }
        if self.piece_bytes.is_some_and(|b| !(4096..=1 << 30).contains(&b)) {
            let given = self.piece_bytes.unwrap_or_default();
            return Err(EngineError::argument("piece_bytes", given, "must be 4096 bytes to 1 GiB"));
        }
        if self.policy.is_none() && (!self.pinned.is_empty() || self.pin_threshold > 0 || self.policy_budget.is_some())
        {
            let what = "pinned, pin_threshold and policy_budget need a policy; the static schedule has none";
            return Err(EngineError::argument("policy", "None", what));
        }
        self.check_placement()?;
        most("threads", self.threads.unwrap_or(1), 1024)?;
        most("prefill_chunk", self.prefill_chunk, 65_536)?;
        most("max_batch", self.max_batch, 65_536)
    }
}

/// Options of one generation.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationOptions {
    /// Most new tokens; `None` to go on until a stop token or the end of the context.
    pub max_new_tokens: Option<usize>,
    /// 0 for the greedy choice; else logits are divided by it before a token is drawn.
    pub temperature: f32,
    /// Draw from the `top_k` most likely tokens; 0 for all.
    pub top_k: usize,
    /// Draw from the smallest set of tokens whose probabilities add up to `top_p`; 1 for all.
    pub top_p: f32,
    /// Seed of the draws: the same seed gives the same tokens.
    pub seed: u64,
    /// Tokens that end the generation; they are not part of the result.
    pub stop_tokens: Vec<u32>,
    /// Most tokens that a prompt-lookup draft proposes for one step, all of which are verified in that step; 0 for none.
    /// Greedy generations only. Tokens don't depend on it.
    pub speculation: usize,
    /// Keep the logits from which each token was chosen: `vocab` floats a token. For audits.
    pub keep_logits: bool,
}

impl Default for GenerationOptions {
    fn default() -> Self {
        GenerationOptions {
            max_new_tokens: None,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            seed: 0,
            stop_tokens: Vec::new(),
            speculation: 0,
            keep_logits: false,
        }
    }
}

impl GenerationOptions {
    /// Greedy, without stop tokens.
    pub fn greedy(max_new_tokens: usize) -> GenerationOptions {
        GenerationOptions { max_new_tokens: Some(max_new_tokens), ..GenerationOptions::default() }
    }

    /// Checks every option.
    pub fn check(&self) -> Result<()> {
        if !self.temperature.is_finite() || self.temperature < 0.0 {
            return Err(EngineError::argument("temperature", self.temperature, "must be 0 (greedy) or positive"));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(EngineError::argument("top_p", self.top_p, "must be above 0 and at most 1"));
        }
        if self.speculation > MAX_DRAFT {
            return Err(EngineError::argument("speculation", self.speculation, format!("must be at most {MAX_DRAFT}")));
        }
        if self.speculation > 0 && self.temperature > 0.0 {
            let what = "drafts are verified against greedy choices; leave temperature at 0";
            return Err(EngineError::argument("speculation", self.speculation, what));
        }
        Ok(())
    }
}
