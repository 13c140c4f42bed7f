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
