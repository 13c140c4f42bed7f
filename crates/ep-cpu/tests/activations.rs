//! Quantised activation rows hold the contract's codes, steps and sums, whatever the level.

mod common;

use common::{KINDS, WIDTHS, activations, generator};
use headrace_ep_cpu::activations::Activations;
use headrace_ep_cpu::simd::SimdLevel;
use headrace_numerics::activation::quantise;

#[test]
fn rows_hold_the_contracts_codes_steps_and_sums() {
    let rng = &mut generator(1);
    let mut acts = Activations::new();
    for level in SimdLevel::available() {
        for width in WIDTHS {
            for cols in [1, 16, 31, 32, 33, 255, 256, 257, 500, 576, 1536] {
                for kind in KINDS {
                    for rows in [3, 1] {
                        let x = activations(rows, cols, kind, rng);
                        acts.prepare(rows, cols, width);
                        for (r, x) in x.chunks_exact(cols).enumerate() {
                            acts.quantise_row(level, r, x);
                        }
                        for (r, x) in x.chunks_exact(cols).enumerate() {
                            let want = quantise(x, width);
                            let got = acts.block_values(r);
                            assert_eq!(got.len() % 8, 0);
                            for (b, (d, codes, sum, first)) in got.into_iter().enumerate() {
                                let zero = [0i16; 32];
                                let codes_of = want.codes.get(b * 32..b * 32 + 32).unwrap_or(&zero);
                                let wanted = want.d.get(b).copied().unwrap_or(0.0);
                                let what = format!("{level} {width:?} {cols} {kind:?} block {b}");
                                assert_eq!(d.to_bits(), wanted.to_bits(), "{what}");
                                assert_eq!(codes, codes_of, "{what}");
                                assert_eq!(sum, codes_of.iter().map(|&c| i32::from(c)).sum::<i32>(), "{what}");
                                assert_eq!(first, codes_of[..16].iter().map(|&c| i32::from(c)).sum::<i32>(), "{what}");
                            }
                        }
                    }
                }
            }
        }
    }
}
