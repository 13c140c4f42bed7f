//! The contract against higher precision and against its own words: what each operation is, at its edges too.

use headrace_numerics::activation::{ActivationWidth, quantise, split};
use headrace_numerics::argmax::argmax;
use headrace_numerics::attention::{AttentionParams, CHUNK, attend};
use headrace_numerics::elementwise::{EXP_MAX, EXP_MIN, KvDtype, exp, swiglu, tanh};
use headrace_numerics::format::{Format, Nbits, ScaleType, WeightView, ZeroPoint};
use headrace_numerics::linear::{dense_dot, epilogue, quantised_dot};
use headrace_numerics::norm::rms_norm;
use headrace_numerics::reduce::tree;
use headrace_numerics::rope::{RopeStyle, inv_freq, rotate, table_row};

/// A small generator of numbers that needs no crate: values in -1 .. 1.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as f32 / (1u64 << 30) as f32) - 1.0
    }

    fn take(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next()).collect()
    }
}

fn ulps(a: f32, b: f64) -> f64 {
    let b32 = b as f32;
    let ulp = f64::from(f32::from_bits(b32.to_bits() + 1)) - f64::from(b32);
    (f64::from(a) - b).abs() / ulp
}

#[test]
fn exp_is_within_two_ulp_and_clamped_at_its_ends() {
    let mut x = -103.0f32;
    while x < 88.7 {
        let want = f64::from(x).exp();
        assert!(ulps(exp(x), want) <= 2.0, "exp({x}) = {} against {want}", exp(x));
        x += 0.000_97;
    }
    assert_eq!(exp(0.0), 1.0);
    assert_eq!(exp(EXP_MIN), 0.0);
    assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    assert_eq!(exp(EXP_MAX), f32::INFINITY);
    assert_eq!(exp(f32::INFINITY), f32::INFINITY);
    assert!(exp(f32::NAN).is_nan());
}

#[test]
fn swiglu_and_tanh_agree_with_double_precision() {
    let mut n = Numbers(1);
    for _ in 0..10_000 {
        let (g, u) = (n.next() * 20.0, n.next() * 5.0);
        let want = f64::from(g) / (1.0 + (-f64::from(g)).exp()) * f64::from(u);
        assert!((f64::from(swiglu(g, u)) - want).abs() <= 1e-6 * want.abs() + 1e-9, "swiglu({g}, {u})");
        assert!((f64::from(tanh(g)) - f64::from(g).tanh()).abs() < 3e-7, "tanh({g})");
    }
    assert_eq!((tanh(100.0), tanh(-100.0)), (1.0, -1.0));
}

#[test]
fn the_tree_adds_in_the_written_order() {
    let mut lanes = [1e8f32, 1.0, -1e8, 2.0, 3.0, 4.0, 5.0, 6.0];
    let by_hand = ((1e8f32 + 3.0) + (-1e8f32 + 5.0)) + ((1.0f32 + 4.0) + (2.0f32 + 6.0));
    assert_eq!(tree(&mut lanes).to_bits(), by_hand.to_bits());
}

#[test]
fn quantisation_keeps_to_half_a_step_and_marks_what_it_cannot_hold() {
    let mut n = Numbers(2);
    for width in [ActivationWidth::Int16, ActivationWidth::Int8] {
        let x = n.take(70);
        let row = quantise(&x, width);
        assert_eq!((row.codes.len(), row.d.len()), (96, 3));
        for (i, &v) in x.iter().enumerate() {
            let back = row.d[i / 32] * f32::from(row.codes[i]);
            assert!((back - v).abs() <= row.d[i / 32] * 0.5001);
            assert!(f32::from(row.codes[i]).abs() <= width.max_code());
        }
        assert!(row.codes[70..].iter().all(|&c| c == 0));
        // A block of zeros, one whose quotient overflows, one that isn't finite.
        let row = quantise(&[vec![0.0; 32], vec![1e-40; 32], vec![f32::NAN; 32]].concat(), width);
        assert_eq!(row.d[..2], [0.0, 0.0]);
        assert!(row.d[2].is_nan() && row.codes.iter().all(|&c| c == 0));
        assert!(quantise(&[f32::NEG_INFINITY, 1.0], width).d[0].is_infinite());
        // Half to even.
        let mut x = vec![0.0; 32];
        (x[0], x[1], x[2]) = (width.max_code(), 2.5, 3.5);
        assert_eq!(quantise(&x, width).codes[1..3], [2, 4]);
    }
}

#[test]
fn codes_split_into_two_signed_bytes() {
    for code in -32512..=32512i16 {
        let (hi, lo) = split(code);
        assert_eq!(256 * i32::from(hi) + i32::from(lo), i32::from(code));
    }
}

#[test]
fn argmax_is_a_total_order() {
    assert_eq!(argmax(&[1.0, 3.0, 3.0, 2.0]), Ok(1));
    assert_eq!(argmax(&[-0.0, 0.0]), Ok(0));
    assert_eq!(argmax(&[1.0, f32::INFINITY, f32::NAN]), Err(1));
    assert_eq!(argmax(&[]), Err(0));
}

#[test]
fn norm_agrees_with_double_precision() {
    let mut n = Numbers(3);
    for len in [1, 64, 255, 576, 5120] {
        let (x, w) = (n.take(len), n.take(len));
        let mut out = vec![0.0; len];
        rms_norm(&x, &w, 1e-5, &mut out);
        let sum: f64 = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
        let inv = 1.0 / (sum / len as f64 + 1e-5).sqrt();
        for i in 0..len {
            let want = f64::from(x[i]) * inv * f64::from(w[i]);
            assert!((f64::from(out[i]) - want).abs() <= 1e-6 * want.abs() + 1e-7);
        }
    }
}

#[test]
fn rope_rotates_and_both_styles_are_the_same_rotation() {
    let freqs: Vec<f64> = (0..4).map(|i| inv_freq(10_000.0, 8, None, i)).collect();
    let (mut cos, mut sin) = ([0.0; 4], [0.0; 4]);
    table_row(&freqs, 17, &mut cos, &mut sin);
    assert!((f64::from(cos[0]) - 17f64.cos()).abs() < 1e-7);
    let mut n = Numbers(4);
    let original = n.take(10);
    let mut half = original.clone();
    rotate(&mut half, RopeStyle::Half, &cos, &sin);
    let mut interleaved = original.clone();
    for i in 0..4 {
        (interleaved[2 * i], interleaved[2 * i + 1]) = (original[i], original[i + 4]);
    }
    rotate(&mut interleaved, RopeStyle::Interleaved, &cos, &sin);
    for i in 0..4 {
        assert_eq!((half[i], half[i + 4]), (interleaved[2 * i], interleaved[2 * i + 1]));
        let before = original[i].hypot(original[i + 4]);
        assert!((half[i].hypot(half[i + 4]) - before).abs() < 1e-6);
    }
    assert_eq!(half[8..], original[8..], "elements past the rotated ones are left alone");
    let factors = [2.0f32, 1.0, 1.0, 1.0];
    assert_eq!(inv_freq(10_000.0, 8, Some(&factors), 0), 0.5);
}

#[test]
fn attention_agrees_with_double_precision_with_and_without_a_window() {
    let mut n = Numbers(5);
    let dim = 16;
    for (pos, window) in [(0, None), (31, None), (32, None), (200, None), (200, Some(40)), (200, Some(1))] {
        let (q, k, v) = (n.take(dim), n.take(dim * (pos + 1)), n.take(dim * (pos + 1)));
        let params = AttentionParams { scale: 0.25, softcap: 0.0, window };
        let mut out = vec![0.0; dim];
        attend(&q, &k, &v, pos, &params, &mut out);
        let first = window.map_or(0, |w| pos + 1 - w.min(pos + 1));
        assert_eq!(params.first_visible(pos), first);
        let dot = |j: usize| -> f64 { (0..dim).map(|d| f64::from(q[d]) * f64::from(k[j * dim + d])).sum() };
        let p: Vec<f64> = (first..=pos).map(|j| (dot(j) * 0.25).exp()).collect();
        let total: f64 = p.iter().sum();
        for d in 0..dim {
            let want: f64 = p.iter().zip(first..=pos).map(|(p, j)| p * f64::from(v[j * dim + d])).sum::<f64>() / total;
            assert!((f64::from(out[d]) - want).abs() < 1e-6, "pos {pos} window {window:?}");
        }
    }
    assert_eq!(CHUNK, 32);
}

#[test]
fn a_quantised_row_agrees_with_its_dequantised_product() {
    // Nbits: 4-bit codes in blocks of 32, float scales, a row of 70 columns with a partial last block.
    let n = Nbits { bits: 4, block: 32, scale: ScaleType::F32, zero: ZeroPoint::PerBlock };
    let mut numbers = Numbers(6);
    let codes: Vec<u8> = (0..48).map(|i| (i * 37 + 11) as u8).collect();
    let scales: Vec<u8> = [0.5f32, 0.25, 2.0].iter().flat_map(|s| s.to_le_bytes()).collect();
    let zeros = [0x7A_u8, 0x03];
    let w = WeightView::new(Format::Nbits(n), 1, 70, [&codes, &scales, &zeros]).unwrap();
    let mut dequantised = vec![0.0; 70];
    headrace_numerics::block::dequantise_row(&w, 0, &mut dequantised);
    assert_eq!(dequantised[0], (11.0 - 10.0) * 0.5);
    assert_eq!(dequantised[33], f32::from(i16::from(codes[16] >> 4) - 7) * 0.25);
    let x = numbers.take(70);
    let want: f64 = dequantised.iter().zip(&x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    let got = quantised_dot(&w, 0, &quantise(&x, ActivationWidth::Int16));
    assert!((f64::from(got) - want).abs() < 0.01, "{got} against {want}");
    assert_eq!(epilogue(1.0, Some(2.0), Some(-5.0)), -2.0);
}

#[test]
fn a_dense_row_agrees_with_double_precision() {
    let mut n = Numbers(7);
    let (w, x) = (n.take(1000), n.take(1000));
    let bytes: Vec<u8> = w.iter().flat_map(|v| v.to_le_bytes()).collect();
    let view = WeightView::new(Format::F32, 1, 1000, [&bytes, &[], &[]]).unwrap();
    let want: f64 = w.iter().zip(&x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    assert!((f64::from(dense_dot(&view, 0, &x)) - want).abs() < 1e-4);
}

#[test]
fn views_refuse_planes_that_are_too_short() {
    assert!(WeightView::new(Format::Q4_0, 2, 64, [&[0; 72], &[], &[]]).is_some());
    assert!(WeightView::new(Format::Q4_0, 2, 64, [&[0; 71], &[], &[]]).is_none());
    assert!(WeightView::new(Format::Q4_0, 2, 33, [&[0; 720], &[], &[]]).is_none());
    assert_eq!(KvDtype::F16.round(65520.0), f32::INFINITY);
}
