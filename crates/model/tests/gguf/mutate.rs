//! Random damage to sound files: a typed error or a model whose weights can be read, never a panic or a long wait.
//!
//! `HEADRACE_MUTATIONS` sets the number of files (default 20,000). The fuzz target goes deeper; this runs everywhere.

use std::time::{Duration, Instant};

use headrace_model::gguf::parse_bytes;
use headrace_numerics::block::dequantise_row;

use crate::writer::{Gguf, HIDDEN, VOCAB, Val};

/// A small generator (xorshift64*), so that a failure can be run again.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 11) as usize % n
    }
}

/// Numbers that parsers stumble over.
const EDGES: [u64; 12] = [0, 1, 2, 3, 8, 32, 255, 1 << 31, 1 << 32, 1 << 60, i64::MAX as u64, u64::MAX];

fn damage(rng: &mut Rng, bytes: &mut Vec<u8>, donor: &[u8]) {
    for _ in 0..1 + rng.below(4) {
        let at = rng.below(bytes.len().max(1)).min(bytes.len());
        let len = (1 + rng.below(16)).min(bytes.len() - at);
        match rng.below(7) {
            0 if len > 0 => bytes[at] ^= 1 << rng.below(8),
            1 if len > 0 => bytes[at] = rng.next() as u8,
            2 | 3 => {
                let edge = EDGES[rng.below(EDGES.len())].to_le_bytes();
                let width = [2, 4, 8][rng.below(3)].min(bytes.len() - at);
                bytes[at..at + width].copy_from_slice(&edge[..width]);
            }
            4 => drop(bytes.drain(at..at + len)),
            5 => {
                let from = rng.below(donor.len() - 16);
                bytes.splice(at..at, donor[from..from + len].iter().copied());
            }
            _ if rng.below(8) == 0 => bytes.truncate(at),
            _ => {}
        }
    }
}

#[test]
fn random_damage() {
    let mut full = Gguf::tiny("llama");
    full.f16("output.weight", &[HIDDEN, VOCAB]).f32("rope_freqs.weight", 2).f32("blk.0.attn_output.bias", 8);
    full.set("llama.attention.head_count_kv", Val::I32s(vec![1])).set("general.alignment", Val::U32(32));
    full.set("tokenizer.ggml.token_type", Val::I32s(vec![1; 10])).set("llama.attention.key_length", Val::U32(4));
    let seeds = [Gguf::tiny("llama").build(), Gguf::tiny("qwen2").build(), Gguf::tiny("qwen3").build(), full.build()];
    let runs = std::env::var("HEADRACE_MUTATIONS").map_or(20_000, |n| n.parse().unwrap());
    let mut rng = Rng(0x9e37_79b9_7f4a_7c15);
    let (mut loaded, mut slowest) = (0u64, Duration::ZERO);
    for run in 0..runs {
        let mut bytes = seeds[rng.below(4)].clone();
        damage(&mut rng, &mut bytes, &seeds[3]);
        let size = bytes.len();
        let start = Instant::now();
        match parse_bytes("damaged.gguf", bytes) {
            Err(error) => assert!(error.to_string().len() < 2000, "run {run}"),
            Ok(m) => {
                loaded += 1;
                assert!(m.spec.weight_bytes() <= size, "run {run}");
                for id in m.spec.read_order() {
                    let view = m.spec.view(id).unwrap();
                    dequantise_row(&view, view.rows - 1, &mut vec![0.0; view.cols]);
                }
            }
        }
        slowest = slowest.max(start.elapsed());
    }
    println!("{runs} files, {loaded} of them still models, the slowest took {slowest:?}");
    assert!(slowest < Duration::from_secs(5), "{slowest:?}");
    assert!(loaded > runs / 100 && loaded < runs, "the damage is too strong or too weak: {loaded} of {runs}");
}
