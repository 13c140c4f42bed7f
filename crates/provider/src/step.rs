//! One step's inputs and results: token rows, page tables, logits.

/// Which token a row holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// The token of this id.
    Id(u32),
    /// What wanted row `i` of the step submitted just before this one chose, whether that step is done yet or not. Both steps
    /// are of one program. Where that choice is none, because a logit was not finite, the row's results mean nothing.
    Chosen(usize),
}

impl From<u32> for Token {
    fn from(id: u32) -> Token {
        Token::Id(id)
    }
}

/// One row of a step: a token of one sequence at one position. A decode batch, a prefill chunk and a draft to verify
/// are all lists of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRow {
    /// Index into [`StepInput::page_tables`].
    pub sequence: usize,
    /// Position in the sequence, from 0.
    pub position: usize,
    /// Token.
    pub token: Token,
}

/// What one step computes. Rows of one sequence have increasing positions; all of a sequence's earlier positions are
/// in its pages already or in earlier rows of this step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepInput {
    /// The rows.
    pub rows: Vec<TokenRow>,
    /// For each sequence of the step, its pages in order; long enough for every position of its rows.
    pub page_tables: Vec<Vec<u32>>,
    /// Rows whose logits are wanted, as increasing indices into `rows`.
    pub wanted: Vec<usize>,
    /// True to copy the wanted logits to the host; false to learn the arg-maxima only.
    pub want_logits: bool,
}

/// What one step gave. Reused from step to step, so that a steady step allocates nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// The greedy choice of each wanted row; `Err(index)` names the first non-finite logit.
    pub tokens: Vec<Result<u32, u32>>,
    /// `[wanted, vocab]`, if [`StepInput::want_logits`] is set, else empty.
    pub logits: Vec<f32>,
}
