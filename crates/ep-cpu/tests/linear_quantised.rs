//! Quantised linear layers: every format, width, level and odd size gives the contract's bits.

mod common;

use common::{KINDS, Kind, Matrix, WIDTHS, activations, generator, quantised_formats, run};
use headrace_ep_cpu::simd::SimdLevel;
use headrace_numerics::format::Format;
use proptest::prelude::*;

/// Numbers of columns around the edges of blocks and groups.
fn widths_of(format: Format) -> Vec<usize> {
    let odd: &[usize] = match format {
        Format::Nbits(_) => &[1, 15, 16, 17, 33, 64, 200, 240, 241, 256, 257, 300, 576, 1000],
        _ if format.col_multiple() == 256 => &[256, 512, 768],
        _ => &[32, 64, 224, 256, 288, 576, 1536],
    };
    odd.to_vec()
}

#[test]
fn every_format_and_size_gives_the_contracts_bits() {
    let rng = &mut generator(1);
    for level in SimdLevel::available() {
        for format in quantised_formats() {
            for cols in widths_of(format) {
                for kind in KINDS {
                    for rows in [1, 2, 3] {
                        let m = Matrix::random(format, 5, cols, kind, rng);
                        let x = activations(rows, cols, if kind == Kind::Any { Kind::Plain } else { kind }, rng);
                        for width in WIDTHS {
                            run(level, &m, &x, rows, width, rng.random());
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn bad_and_extreme_activations_give_the_contracts_bits() {
    let rng = &mut generator(2);
    for level in SimdLevel::available() {
        for format in quantised_formats() {
            for kind in KINDS {
                for rows in [1, 4, 7] {
                    let cols = if format.col_multiple() == 256 { 512 } else { 352 };
                    let m = Matrix::random(format, 9, cols, Kind::Plain, rng);
                    let x = activations(rows, cols, kind, rng);
                    for width in WIDTHS {
                        run(level, &m, &x, rows, width, rng.random());
                    }
                }
            }
        }
    }
}

#[test]
fn long_rows_and_many_rows_give_the_contracts_bits() {
    let rng = &mut generator(3);
    for level in SimdLevel::available() {
        for format in [Format::Q4_0, Format::Q8_0, Format::Q4_K, Format::Q6_K] {
            for (rows_of_weights, cols, rows) in [(3, 16384, 3), (70, 512, 33), (131, 256, 1)] {
                let m = Matrix::random(format, rows_of_weights, cols, Kind::Plain, rng);
                let x = activations(rows, cols, Kind::Plain, rng);
                for width in WIDTHS {
                    run(level, &m, &x, rows, width, rng.random());
                }
            }
        }
    }
}

use rand::Rng;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn random_shapes_give_the_contracts_bits(
        format in prop::sample::select(quantised_formats()),
        level in prop::sample::select(SimdLevel::available()),
        width in prop::sample::select(WIDTHS.to_vec()),
        kind in prop::sample::select(KINDS.to_vec()),
        of_x in prop::sample::select(KINDS.to_vec()),
        weight_rows in 1usize..40,
        cols in 1usize..1200,
        rows in 1usize..12,
        seed: u64,
    ) {
        let cols = cols.next_multiple_of(format.col_multiple());
        let rng = &mut generator(seed);
        let m = Matrix::random(format, weight_rows, cols, kind, rng);
        let x = activations(rows, cols, of_x, rng);
        run(level, &m, &x, rows, width, seed);
    }
}
