//! Unquantised linear layers: every type, level and odd size gives the contract's bits.

mod common;

use common::{KINDS, Matrix, activations, generator, run};
use headrace_ep_cpu::simd::SimdLevel;
use headrace_numerics::activation::ActivationWidth;
use headrace_numerics::format::Format;
use rand::Rng;

#[test]
fn every_type_and_size_gives_the_contracts_bits() {
    let rng = &mut generator(1);
    for level in SimdLevel::available() {
        for format in [Format::F32, Format::F16, Format::BF16] {
            for cols in [1, 15, 16, 17, 63, 64, 65, 96, 127, 128, 200, 576, 1001] {
                for kind in KINDS {
                    for rows in [1, 2, 3, 4, 5, 9] {
                        let m = Matrix::random(format, 3, cols, kind, rng);
                        let x = activations(rows, cols, kind, rng);
                        run(level, &m, &x, rows, ActivationWidth::Int16, rng.random());
                    }
                }
            }
        }
    }
}

/// Every product underflows to -0 in every lane; a lane without an element in the tail must not be turned into +0.
#[test]
fn lanes_without_an_element_keep_a_negative_zero() {
    let rng = &mut generator(2);
    for level in SimdLevel::available() {
        for rows in [1, 2, 4] {
            let mut m = Matrix::random(Format::F32, 3, 70, common::Kind::Plain, rng);
            for weight in m.planes[0].chunks_exact_mut(4) {
                weight.copy_from_slice(&(-1e-30f32).to_le_bytes());
            }
            let x = vec![1e-30; rows * 70];
            for _ in 0..16 {
                run(level, &m, &x, rows, ActivationWidth::Int16, rng.random());
            }
        }
    }
}
