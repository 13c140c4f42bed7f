//! The step descriptor: rows, wanted rows and page tables of one step as the bytes that the kernels read.

use std::collections::HashMap;

use headrace_kv::KvGeometry;
use headrace_provider::{StepInput, StepProgram, Token};

use crate::abi::{StepHeader, StepRef, StepRow, TOKEN_FEEDBACK};

/// Where the parts of a descriptor lie, in bytes from its start. Fixed for the life of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorLayout {
    /// Most rows.
    pub max_rows: usize,
    /// Most wanted rows.
    pub max_wanted: usize,
    /// Most entries of all page tables together.
    pub max_pages: usize,
}

const HEADER: usize = size_of::<StepHeader>();
const ROW: usize = size_of::<StepRow>();

impl DescriptorLayout {
    /// A layout for `program`: page tables of as many sequences as rows, each up to `max_context` positions, and no more
    /// entries than `store_pages`, the pages that the device could ever hold.
    pub fn new(program: &StepProgram, kv: &KvGeometry, max_context: usize, store_pages: usize) -> DescriptorLayout {
        let each = kv.pages_for(max_context.max(1));
        DescriptorLayout {
            max_rows: program.max_rows,
            max_wanted: program.max_wanted,
            max_pages: each.saturating_mul(program.max_rows).min(store_pages.max(each)),
        }
    }

    fn wanted_at(&self) -> usize {
        HEADER + self.max_rows * ROW
    }

    fn pages_at(&self) -> usize {
        self.wanted_at() + self.max_wanted * 4
    }

    /// Bytes of a descriptor.
    pub fn bytes(&self) -> usize {
        self.pages_at() + self.max_pages * 4
    }

    /// The parts of a descriptor that starts at `address`.
    pub fn at(&self, address: u64) -> StepRef {
        StepRef {
            header: address,
            rows: address + HEADER as u64,
            wanted: address + self.wanted_at() as u64,
            pages: address + self.pages_at() as u64,
        }
    }
}

/// What the descriptor says about a step beside its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Filled {
    /// Bytes that have to be copied: a head of the descriptor.
    pub bytes: usize,
    /// Positions that attention looks back over, at most: the largest position, and one.
    pub positions: usize,
}

/// Checks steps and writes their descriptors. Kept from step to step, so that a steady step allocates nothing.
#[derive(Debug, Default)]
pub struct StepWriter {
    last_position: Vec<Option<usize>>,
    tables: HashMap<usize, u32>,
}

/// What a step is checked against.
#[derive(Clone, Copy, Debug)]
pub struct StepLimits<'a> {
    /// Geometry of the pages.
    pub kv: &'a KvGeometry,
    /// Pages that are mapped; sparse ranges name the pages behind the last mapped byte as absent.
    pub pages: usize,
    /// Vocabulary.
    pub vocab: usize,
    /// Positions of the rotation tables.
    pub positions: usize,
    /// Tokens that the step before chooses and that can be fed back.
    pub chosen: usize,
}

/// A step's number, and its slot on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Serial {
    /// Number.
    pub number: u32,
    /// Slot.
    pub slot: u32,
}

/// The word that says where a row's token comes from.
fn token_word(row: usize, token: Token, limits: StepLimits<'_>) -> Result<u32, String> {
    match token {
        Token::Id(id) if id as usize >= limits.vocab => {
            Err(format!("row {row}: token {id} of a vocabulary of {}", limits.vocab))
        }
        Token::Id(id) => Ok(id),
        Token::Chosen(wanted) if wanted >= limits.chosen => {
            Err(format!("row {row}: the choice of wanted row {wanted}; {} can be fed back", limits.chosen))
        }
        // Lossless: wanted rows are no more than rows, which are below 2^31.
        Token::Chosen(wanted) => Ok(TOKEN_FEEDBACK | wanted as u32),
    }
}

impl StepWriter {
    /// Writes the descriptor of `input` into `bytes`. The error says which row is wrong and why; nothing may be run then.
    pub fn write(
        &mut self,
        input: &StepInput,
        layout: &DescriptorLayout,
        limits: StepLimits<'_>,
        serial: Serial,
        bytes: &mut [u8],
    ) -> Result<Filled, String> {
        let (rows, wanted) = (input.rows.len(), input.wanted.len());
        if bytes.len() < layout.bytes() {
            return Err(format!("a descriptor of {} bytes in {}", layout.bytes(), bytes.len()));
        }
        if rows == 0 || rows > layout.max_rows {
            return Err(format!("{rows} rows; the program takes 1 to {}", layout.max_rows));
        }
        if wanted > layout.max_wanted {
            return Err(format!("{wanted} wanted rows; the program takes {} at most", layout.max_wanted));
        }
        if input.wanted.iter().any(|&w| w >= rows) || input.wanted.windows(2).any(|w| w[0] >= w[1]) {
            return Err("wanted rows must be increasing indices of rows".to_string());
        }
        self.last_position.clear();
        self.last_position.resize(input.page_tables.len(), None);
        let mut positions = 0;
        for (i, row) in input.rows.iter().enumerate() {
            token_word(i, row.token, limits)?;
            let sequences = input.page_tables.len();
            let (Some(table), Some(last)) =
                (input.page_tables.get(row.sequence), self.last_position.get_mut(row.sequence))
            else {
                return Err(format!("row {i}: sequence {} of {sequences}", row.sequence));
            };
            if row.position / limits.kv.page_tokens.max(1) >= table.len() {
                let held = table.len() * limits.kv.page_tokens;
                return Err(format!("row {i}: position {} in pages for {held}", row.position));
            }
            if row.position >= limits.positions {
                return Err(format!("row {i}: position {} of a context of {}", row.position, limits.positions));
            }
            if last.is_some_and(|l| row.position <= l) {
                return Err(format!("sequence {}: positions are not increasing", row.sequence));
            }
            *last = Some(row.position);
            positions = positions.max(row.position + 1);
        }
        let Serial { number, slot } = serial;
        let header = StepHeader { rows: rows as u32, wanted: wanted as u32, serial: number, slot };
        put(bytes, 0, &[header.rows, header.wanted, header.serial, header.slot]);
        let filled = self.write_tables(input, layout, limits, bytes)?;
        for (i, row) in input.rows.iter().enumerate() {
            let table = self.tables.get(&row.sequence).copied().unwrap_or_default();
            // Narrowing is lossless: positions are below the context length, sequences below the number of tables.
            put(
                bytes,
                HEADER + i * ROW,
                &[row.sequence as u32, row.position as u32, token_word(i, row.token, limits)?, table],
            );
        }
        for (i, &w) in input.wanted.iter().enumerate() {
            put(bytes, layout.wanted_at() + i * 4, &[w as u32]);
        }
        Ok(Filled { bytes: filled, positions })
    }

    /// Writes the part of each sequence's table that its rows reach back to. Returns the bytes of the descriptor so far.
    fn write_tables(
        &mut self,
        input: &StepInput,
        layout: &DescriptorLayout,
        limits: StepLimits<'_>,
        bytes: &mut [u8],
    ) -> Result<usize, String> {
        self.tables.clear();
        let mut entries = 0;
        for (sequence, last) in self.last_position.iter().enumerate() {
            let (Some(last), Some(table)) = (last, input.page_tables.get(sequence)) else { continue };
            let needed = last / limits.kv.page_tokens.max(1) + 1;
            let used = table.get(..needed).unwrap_or(table);
            if entries + used.len() > layout.max_pages {
                return Err(format!("page tables of more than {} entries", layout.max_pages));
            }
            if let Some(page) = used.iter().find(|&&p| p as usize >= limits.pages) {
                return Err(format!("page {page}, but the range holds {}", limits.pages));
            }
            self.tables.insert(sequence, entries as u32);
            for (i, &page) in used.iter().enumerate() {
                put(bytes, layout.pages_at() + (entries + i) * 4, &[page]);
            }
            entries += used.len();
        }
        Ok(layout.pages_at() + entries * 4)
    }
}

/// Writes little-endian words at byte `at`; the caller has checked the length.
fn put(bytes: &mut [u8], at: usize, words: &[u32]) {
    for (to, word) in bytes[at..at + words.len() * 4].chunks_exact_mut(4).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headrace_kv::KvLayout;
    use headrace_numerics::elementwise::KvDtype;
    use headrace_provider::TokenRow;

    const KV: KvGeometry = KvGeometry {
        layers: 1,
        kv_heads: 1,
        head_dim: 8,
        dtype: KvDtype::F16,
        layout: KvLayout::HeadMajor,
        page_tokens: 32,
    };
    const LAYOUT: DescriptorLayout = DescriptorLayout { max_rows: 4, max_wanted: 3, max_pages: 9 };
    const LIMITS: StepLimits<'static> = StepLimits { kv: &KV, pages: 50, vocab: 100, positions: 128, chosen: 2 };

    fn row(sequence: usize, position: usize, token: u32) -> TokenRow {
        TokenRow { sequence, position, token: token.into() }
    }

    fn good() -> StepInput {
        StepInput {
            rows: vec![row(2, 63, 7), row(0, 3, 9), row(2, 64, 8)],
            page_tables: vec![vec![40, 41], vec![1, 2, 3], vec![10, 11, 12, 13]],
            wanted: vec![1, 2],
            want_logits: false,
        }
    }

    fn write(input: &StepInput) -> Result<(Filled, Vec<u32>), String> {
        let mut bytes = vec![0xeeu8; LAYOUT.bytes()];
        let filled = StepWriter::default().write(input, &LAYOUT, LIMITS, Serial { number: 5, slot: 3 }, &mut bytes)?;
        let words = bytes.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect();
        Ok((filled, words))
    }

    #[test]
    fn the_kernels_find_every_row_its_pages_and_the_wanted_rows() {
        let (filled, words) = write(&good()).unwrap();
        let at = LAYOUT.at(0);
        assert_eq!(words[..4], [3, 2, 5, 3]);
        let rows = &words[at.rows as usize / 4..];
        let pages = &words[at.pages as usize / 4..];
        assert_eq!(rows[..4], [2, 63, 7, rows[3]]);
        assert_eq!(rows[4..8], [0, 3, 9, rows[7]]);
        assert_eq!(rows[8..12], [2, 64, 8, rows[3]]);
        // Only what the rows reach: one page of sequence 0, three of sequence 2, none of sequence 1.
        assert_eq!(pages[rows[7] as usize], 40);
        assert_eq!(pages[rows[3] as usize..][..3], [10, 11, 12]);
        assert_eq!(words[at.wanted as usize / 4..][..2], [1, 2]);
        assert_eq!(filled, Filled { bytes: at.pages as usize + 4 * 4, positions: 65 });
        assert_eq!(LAYOUT.bytes() as u64, at.pages + 9 * 4);
    }

    #[test]
    fn a_chosen_token_is_named_by_its_wanted_row() {
        let mut input = good();
        input.rows[2].token = Token::Chosen(1);
        let (_, words) = write(&input).unwrap();
        let rows = &words[LAYOUT.at(0).rows as usize / 4..];
        assert_eq!([rows[2], rows[6], rows[10]], [7, 9, 0x8000_0001]);
    }

    #[test]
    fn what_could_read_or_write_elsewhere_is_refused() {
        type Change = fn(&mut StepInput);
        let wrong: [(&str, Change); 13] = [
            ("0 rows", |i| i.rows.clear()),
            ("5 rows", |i| i.rows.extend([row(1, 0, 0), row(1, 1, 0)])),
            ("increasing indices", |i| i.wanted = vec![1, 1]),
            ("increasing indices", |i| i.wanted = vec![3]),
            ("wanted rows; the program", |i| i.wanted = vec![0, 1, 2, 2]),
            ("token 100", |i| i.rows[0].token = Token::Id(100)),
            ("wanted row 2; 2 can be fed back", |i| i.rows[0].token = Token::Chosen(2)),
            ("sequence 3 of 3", |i| i.rows[0].sequence = 3),
            ("position 64 in pages for 64", |i| i.rows[1].position = 64),
            ("positions are not increasing", |i| i.rows[2].position = 63),
            ("page 50", |i| i.page_tables[2][1] = 50),
            ("more than 9 entries", |i| i.page_tables[0] = vec![0; 9]),
            ("position 128 of a context", |i| i.page_tables[2] = vec![1; 9]),
        ];
        for (n, (message, change)) in wrong.into_iter().enumerate() {
            let mut input = good();
            change(&mut input);
            if n == 11 {
                input.rows[1].position = 120;
                input.page_tables[2] = vec![1; 7];
                input.rows[2].position = 127;
                input.page_tables.push(vec![0; 4]);
                input.rows.push(row(3, 127, 0));
            }
            if n == 12 {
                input.rows[2].position = 128;
            }
            let error = write(&input).unwrap_err();
            assert!(error.contains(message), "{n}: {error}");
        }
    }

    #[test]
    fn room_for_pages_follows_the_context_and_what_the_device_holds() {
        let program = StepProgram {
            instrs: vec![],
            activations: headrace_numerics::activation::ActivationWidth::Int16,
            max_rows: 8,
            max_wanted: 8,
            slot_bytes: 0,
            slots: 0,
        };
        assert_eq!(DescriptorLayout::new(&program, &KV, 100, 1000).max_pages, 8 * 4);
        assert_eq!(DescriptorLayout::new(&program, &KV, 100, 10).max_pages, 10);
        assert_eq!(DescriptorLayout::new(&program, &KV, 100, 1).max_pages, 4);
    }
}
