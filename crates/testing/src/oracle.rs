//! A scalar reference for whole steps, written directly in the functions of `headrace_numerics`: one token at a time,
//! keys and values as plain vectors, nothing shared, nothing fast.

use headrace_model::ModelSpec;
use headrace_model::spec::{Layout, Linear, RopeTables, TensorId};
use headrace_numerics::activation::{ActivationWidth, quantise};
use headrace_numerics::attention::attend;
use headrace_numerics::block::dequantise_row;
use headrace_numerics::elementwise::{KvDtype, swiglu};
use headrace_numerics::format::{MAX_PLANES, WeightView};
use headrace_numerics::linear::{dense_dot, epilogue, quantised_dot};
use headrace_numerics::norm::rms_norm;
use headrace_numerics::rope::{rotate, scaled_inv_freqs, table_row};

/// Keys and values of one sequence: `[layer][kv head]`, each `[positions, head_dim]`.
#[derive(Clone, Debug)]
pub struct OracleSequence {
    keys: Vec<Vec<Vec<f32>>>,
    values: Vec<Vec<Vec<f32>>>,
    len: usize,
}

/// The reference executor of one model.
pub struct Oracle<'a> {
    model: &'a ModelSpec,
    activations: ActivationWidth,
    kv: KvDtype,
    matrices: Vec<Vec<Vec<u8>>>,
}

impl<'a> Oracle<'a> {
    /// An executor with the given widths of activations and stored keys and values.
    pub fn new(model: &'a ModelSpec, activations: ActivationWidth, kv: KvDtype) -> Oracle<'a> {
        let matrices = (0..model.tensors.len()).map(|i| row_major(model, TensorId(i))).collect();
        Oracle { model, activations, kv, matrices }
    }

    /// A sequence without tokens.
    pub fn sequence(&self) -> OracleSequence {
        let empty = vec![vec![Vec::new(); self.model.config.kv_heads]; self.model.layers.len()];
        OracleSequence { keys: empty.clone(), values: empty, len: 0 }
    }

    /// Appends one token to the sequence and returns its logits, `[vocab]`.
    pub fn token(&self, sequence: &mut OracleSequence, token: u32) -> Vec<f32> {
        let c = &self.model.config;
        let (pos, dim) = (sequence.len, c.head_dim);
        let (cos, sin) = self.angles(pos);
        let mut x = vec![0.0; c.hidden];
        dequantise_row(&self.view(self.model.embedding), token as usize, &mut x);
        for (l, layer) in self.model.layers.iter().enumerate() {
            let normed = self.norm(&x, layer.attn_norm);
            let qkv: Vec<f32> = layer.qkv.iter().flat_map(|w| self.linear(w, &normed, None)).collect();
            let mut attention = Vec::with_capacity(c.heads * dim);
            let head = |i: usize, norm: Option<TensorId>, rotated: bool| {
                let mut head = qkv[i * dim..(i + 1) * dim].to_vec();
                if let Some(norm) = norm {
                    head = self.norm(&head, norm);
                }
                if rotated {
                    rotate(&mut head, c.rope.style, &cos, &sin);
                }
                head
            };
            for h in 0..c.kv_heads {
                let key = head(c.heads + h, layer.k_norm, true);
                let value = head(c.heads + c.kv_heads + h, None, false);
                sequence.keys[l][h].extend(key.iter().map(|&x| self.kv.round(x)));
                sequence.values[l][h].extend(value.iter().map(|&x| self.kv.round(x)));
            }
            for h in 0..c.heads {
                let q = head(h, layer.q_norm, true);
                let kv_head = h / (c.heads / c.kv_heads);
                let (keys, values) = (&sequence.keys[l][kv_head], &sequence.values[l][kv_head]);
                let mut out = vec![0.0; dim];
                attend(&q, keys, values, pos, &layer.attention, &mut out);
                attention.extend(out);
            }
            x = self.linear(&layer.o, &attention, Some(&x));
            let normed = self.norm(&x, layer.ffn_norm);
            let gate_up: Vec<f32> = layer.gate_up.iter().flat_map(|w| self.linear(w, &normed, None)).collect();
            let (gate, up) = gate_up.split_at(c.ffn);
            let hidden: Vec<f32> = gate.iter().zip(up).map(|(&g, &u)| swiglu(g, u)).collect();
            x = self.linear(&layer.down, &hidden, Some(&x));
        }
        sequence.len += 1;
        self.linear(&self.model.lm_head, &self.norm(&x, self.model.final_norm), None)
    }

    fn view(&self, id: TensorId) -> WeightView<'_> {
        let t = self.model.tensor(id);
        let mut planes: [&[u8]; MAX_PLANES] = [&[]; MAX_PLANES];
        for (p, plane) in planes.iter_mut().zip(&self.matrices[id.0]) {
            *p = plane;
        }
        WeightView { format: t.format, rows: t.rows, cols: t.cols, planes }
    }

    fn vector(&self, id: TensorId) -> Vec<f32> {
        let mut v = vec![0.0; self.model.tensor(id).cols];
        dequantise_row(&self.view(id), 0, &mut v);
        v
    }

    fn norm(&self, x: &[f32], weight: TensorId) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        rms_norm(x, &self.vector(weight), self.model.config.norm_eps, &mut out);
        out
    }

    fn linear(&self, l: &Linear, x: &[f32], residual: Option<&[f32]>) -> Vec<f32> {
        let w = self.view(l.weight);
        let bias = l.bias.map(|b| self.vector(b));
        let quantised = quantise(x, self.activations);
        let dot = |row| match w.format.is_quantised() {
            true => quantised_dot(&w, row, &quantised),
            false => dense_dot(&w, row, x),
        };
        (0..w.rows).map(|r| epilogue(dot(r), bias.as_ref().map(|b| b[r]), residual.map(|x| x[r]))).collect()
    }

    fn angles(&self, pos: usize) -> (Vec<f32>, Vec<f32>) {
        let rope = &self.model.config.rope;
        let (mut cos, mut sin) = (vec![0.0; rope.dims / 2], vec![0.0; rope.dims / 2]);
        match &rope.tables {
            RopeTables::Computed { base, factors, position_scale } => {
                let factors = factors.map(|f| self.vector(f));
                let freqs = scaled_inv_freqs(*base, rope.dims, factors.as_deref(), *position_scale);
                table_row(&freqs, pos, &mut cos, &mut sin);
            }
            RopeTables::Stored { cos: c, sin: s } => {
                dequantise_row(&self.view(*c), pos, &mut cos);
                dequantise_row(&self.view(*s), pos, &mut sin);
            }
        }
        (cos, sin)
    }
}

/// The planes of a tensor, row-major whatever they are in the file.
fn row_major(model: &ModelSpec, id: TensorId) -> Vec<Vec<u8>> {
    let t = model.tensor(id);
    let planes: Vec<Vec<u8>> = t.planes.iter().flatten().map(|&e| model.extent(e).to_vec()).collect();
    if t.layout == Layout::RowMajor {
        return planes;
    }
    let size = t.format.row_bytes(0, 1);
    let element = |r: usize, c: usize| &planes[0][(c * t.rows + r) * size..][..size];
    vec![(0..t.rows).flat_map(|r| (0..t.cols).flat_map(move |c| element(r, c).to_vec())).collect()]
}
