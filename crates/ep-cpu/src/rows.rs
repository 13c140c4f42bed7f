//! The token rows of one step, checked and grouped: which rows belong to one sequence, and in what tiles attention
//! takes them.

use std::ops::Range;

use headrace_kv::KvGeometry;
use headrace_provider::{StepInput, StepProgram, Token};

/// Rows of one sequence that attention takes together: each chunk of keys and values is loaded once for all of them.
pub const TILE_ROWS: usize = 16;

/// Rows by sequence. Kept from step to step, so that a steady step allocates nothing.
#[derive(Debug, Default)]
pub struct RowPlan {
    /// Rows, those of one sequence next to each other and in their order.
    pub order: Vec<usize>,
    /// Runs of `order` that belong to one sequence, [`TILE_ROWS`] at most.
    pub tiles: Vec<Range<usize>>,
    /// True if no sequence has two rows.
    pub single: bool,
    /// The largest position.
    pub last_position: usize,
    /// Token id of every row.
    pub tokens: Vec<u32>,
    /// What the last step that chose tokens chose, by wanted row: what [`Token::Chosen`] means. A row without a choice says 0.
    pub chosen: Vec<u32>,
}

impl RowPlan {
    /// Checks a step's input and groups its rows. The error says which row is wrong and why; nothing has been computed
    /// then.
    pub fn plan(
        &mut self,
        input: &StepInput,
        program: &StepProgram,
        kv: &KvGeometry,
        pages: usize,
        vocab: usize,
    ) -> Result<(), String> {
        let (rows, wanted) = (input.rows.len(), input.wanted.len());
        if rows == 0 || rows > program.max_rows {
            return Err(format!("{rows} rows; the program takes 1 to {}", program.max_rows));
        }
        if wanted > program.max_wanted {
            return Err(format!("{wanted} wanted rows; the program takes {} at most", program.max_wanted));
        }
        if input.wanted.iter().any(|&w| w >= rows) || input.wanted.windows(2).any(|w| w[0] >= w[1]) {
            return Err("wanted rows must be increasing indices of rows".to_string());
        }
        self.tokens.clear();
        for (i, row) in input.rows.iter().enumerate() {
            let token = match row.token {
                Token::Id(id) => id,
                Token::Chosen(w) => *self.chosen.get(w).ok_or_else(|| {
                    format!("row {i}: the choice of wanted row {w}; the step before chose {} tokens", self.chosen.len())
                })?,
            };
            if token as usize >= vocab {
                return Err(format!("row {i}: token {token} of a vocabulary of {vocab}"));
            }
            self.tokens.push(token);
            let Some(table) = input.page_tables.get(row.sequence) else {
                return Err(format!("row {i}: sequence {} of {}", row.sequence, input.page_tables.len()));
            };
            if row.position / kv.page_tokens >= table.len() {
                let held = table.len() * kv.page_tokens;
                return Err(format!("row {i}: position {} in pages for {held}", row.position));
            }
        }
        if let Some(page) = input.page_tables.iter().flatten().find(|&&p| p as usize >= pages) {
            return Err(format!("page {page}, but the range holds {pages}"));
        }
        self.last_position = input.rows.iter().map(|r| r.position).max().unwrap_or(0);
        self.order.clear();
        self.order.extend(0..rows);
        self.order.sort_by_key(|&i| input.rows[i].sequence);
        self.tiles.clear();
        self.single = true;
        let mut start = 0;
        for i in 1..=rows {
            let before = input.rows[self.order[i - 1]];
            let next = self.order.get(i).map(|&r| input.rows[r]);
            let same = next.is_some_and(|n| n.sequence == before.sequence);
            if same && next.is_some_and(|n| n.position <= before.position) {
                return Err(format!("sequence {}: positions are not increasing", before.sequence));
            }
            self.single &= !same;
            if !same || i - start == TILE_ROWS {
                self.tiles.push(start..i);
                start = i;
            }
        }
        Ok(())
    }
}
