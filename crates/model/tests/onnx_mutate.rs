//! A million damaged copies of the sound ONNX files: an error or a model, never a panic. Slow, so it is run on demand:
//! `cargo test -p headrace-model --test onnx_mutate -- --ignored`. `fuzz/` does the same guided by coverage.
#![allow(clippy::unwrap_used, clippy::panic)]

mod onnx_common;

use std::path::Path;

use bytes::Bytes;
use headrace_model::onnx;
use headrace_numerics::block::dequantise_row;
use onnx_common::genai_config;
use rand::{Rng, SeedableRng};

fn run(count: usize, seed: u64) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/onnx");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    let seeds: Vec<Vec<u8>> = files
        .iter()
        .filter(|p| p.extension().is_some_and(|e| e == "onnx"))
        .map(|p| std::fs::read(p).unwrap())
        .collect();
    let config = genai_config("llama", 48, 32, 2, 1, 16, 1, 8);
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let (mut loaded, mut refused) = (0usize, 0usize);
    for _ in 0..count {
        let mut bytes = seeds[rng.random_range(0..seeds.len())].clone();
        for _ in 0..rng.random_range(1..6) {
            let (at, len) = (rng.random_range(0..bytes.len()), bytes.len());
            match rng.random_range(0..6) {
                0 => bytes[at] = rng.random(),
                1 => bytes[at] ^= 1 << rng.random_range(0..8),
                2 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][rng.random_range(0..5)],
                3 => drop(bytes.drain(at..(at + rng.random_range(1..9)).min(len))),
                4 => {
                    let from = rng.random_range(0..len);
                    let piece = bytes[from..(from + rng.random_range(1..33)).min(len)].to_vec();
                    bytes.splice(at..at, piece);
                }
                _ => {
                    let from = rng.random_range(0..len);
                    let n = rng.random_range(1..17).min(len - at.max(from));
                    bytes.copy_within(from..from + n, at);
                }
            }
            if bytes.is_empty() {
                bytes.push(0);
            }
        }
        match onnx::parse_bytes(Bytes::from(bytes), config.as_bytes(), Bytes::new()) {
            Err(e) => {
                assert!(e.to_string().len() < 4000);
                refused += 1;
            }
            Ok(spec) => {
                loaded += 1;
                for id in spec.read_order() {
                    let Some(view) = spec.view(id) else { continue };
                    let mut row = vec![0.0; view.cols];
                    dequantise_row(&view, view.rows - 1, &mut row);
                }
            }
        }
    }
    println!("{loaded} loaded, {refused} refused");
    assert!(loaded > 0 && refused > 0);
}

#[test]
fn some_damaged_copies() {
    run(5_000, 1);
}

#[test]
#[ignore = "minutes"]
fn a_million_damaged_copies() {
    run(1_000_000, 2);
}
