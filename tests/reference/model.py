"""Float64 forward pass of Llama, Qwen2 and Qwen3 decoders from dequantised weights, with a float64 KV cache.

Answers one question: what are the logits of this model, without rounding? Nothing here is fast, and nothing here knows
a file format; `gguf_weights.py` and `onnx_weights.py` fill the structures below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray


@dataclass
class Layer:
    """Weights of one decoder layer. Matrices are (outputs, inputs), float64; what a model lacks is None."""

    attention_norm: Array  # (d,)
    q: Array  # (n_heads * head_dim, d)
    k: Array  # (n_kv_heads * head_dim, d)
    v: Array  # (n_kv_heads * head_dim, d)
    o: Array  # (d, n_heads * head_dim)
    ffn_norm: Array  # (d,)
    gate: Array  # (ffn, d)
    up: Array  # (ffn, d)
    down: Array  # (d, ffn)
    q_bias: Array | None = None
    k_bias: Array | None = None
    v_bias: Array | None = None
    q_norm: Array | None = None  # (head_dim,), applied per head before RoPE
    k_norm: Array | None = None  # (head_dim,)


@dataclass
class Decoder:
    """A whole model. `cos` and `sin` are (positions, head_dim / 2)."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float
    cos: Array
    sin: Array
    rope_interleaved: bool
    embedding: Array  # (vocab, d)
    layers: Sequence[Layer]
    final_norm: Array  # (d,)
    lm_head: Array  # (vocab, d); the same array as `embedding` when tied


def rope_tables(head_dim: int, base: float, positions: int, dtype: type = np.float64) -> tuple[Array, Array]:
    """Cosines and sines, each (positions, head_dim / 2), float64; angles and functions are evaluated in `dtype`."""
    exponent = np.arange(0, head_dim, 2).astype(dtype) / dtype(head_dim)
    inverse = dtype(1.0) / np.power(dtype(base), exponent)
    angle = np.arange(positions).astype(dtype)[:, None] * inverse[None, :]
    return np.cos(angle).astype(np.float64), np.sin(angle).astype(np.float64)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """RoPE of x (rows, heads, head_dim); pairs are (2i, 2i+1) if interleaved, else (i, i + head_dim / 2)."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    out = np.empty_like(x)
    half = x.shape[-1] // 2
    first, second = (np.s_[..., 0::2], np.s_[..., 1::2]) if interleaved else (np.s_[..., :half], np.s_[..., half:])
    out[first] = x[first] * cos - x[second] * sin
    out[second] = x[second] * cos + x[first] * sin
    return out


@dataclass
class Session:
    """One sequence: a model and the keys and values of the tokens seen so far."""

    model: Decoder
    keys: list[Array] = field(default_factory=list)  # per layer (position, kv head, head_dim)
    values: list[Array] = field(default_factory=list)
    length: int = 0

    def step(self, token_ids: list[int], last: int | None = None) -> Array:
        """Append tokens; return the logits (rows, vocab) of the last `last` of them (all by default)."""
        m, rows = self.model, len(token_ids)
        if not self.keys:
            empty = np.zeros((0, m.n_kv_heads, m.head_dim))
            self.keys, self.values = [empty] * len(m.layers), [empty] * len(m.layers)
        if self.length + rows > len(m.cos):
            raise ValueError(f"position {self.length + rows - 1} is beyond the {len(m.cos)} rows of the RoPE tables")
        x = m.embedding[np.asarray(token_ids)].astype(np.float64)
        for index in range(len(m.layers)):
            x = self._layer(index, x)
        self.length += rows
        kept = x if last is None else x[-last:]
        return rms_norm(kept, m.final_norm, m.eps) @ m.lm_head.T

    def _layer(self, index: int, x: Array) -> Array:
        m, w, rows = self.model, self.model.layers[index], len(x)
        h = rms_norm(x, w.attention_norm, m.eps)
        q, k, v = (_linear(h, a, b) for a, b in ((w.q, w.q_bias), (w.k, w.k_bias), (w.v, w.v_bias)))
        q = q.reshape(rows, m.n_heads, m.head_dim)
        k = k.reshape(rows, m.n_kv_heads, m.head_dim)
        v = v.reshape(rows, m.n_kv_heads, m.head_dim)
        if w.q_norm is not None:
            q = rms_norm(q, w.q_norm, m.eps)
        if w.k_norm is not None:
            k = rms_norm(k, w.k_norm, m.eps)
        cos, sin = m.cos[self.length : self.length + rows], m.sin[self.length : self.length + rows]
        q, k = rotate(q, cos, sin, m.rope_interleaved), rotate(k, cos, sin, m.rope_interleaved)
        self.keys[index] = np.concatenate([self.keys[index], k])
        self.values[index] = np.concatenate([self.values[index], v])
        x = x + self._attention(q, self.keys[index], self.values[index]) @ w.o.T
        h = rms_norm(x, w.ffn_norm, m.eps)
        gate = h @ w.gate.T
        return x + (gate / (1.0 + np.exp(-gate)) * (h @ w.up.T)) @ w.down.T

    def _attention(self, q: Array, keys: Array, values: Array) -> Array:
        """Causal attention of q (rows, heads, head_dim) over all keys; returns (rows, heads * head_dim)."""
        m, rows, total = self.model, len(q), len(keys)
        group = m.n_heads // m.n_kv_heads
        future = np.arange(total)[None, :] > (total - rows + np.arange(rows))[:, None]
        out = np.empty((rows, m.n_heads, m.head_dim))
        for head in range(m.n_heads):
            score = q[:, head] @ keys[:, head // group].T / np.sqrt(m.head_dim)
            score[future] = -np.inf
            score = np.exp(score - score.max(axis=1, keepdims=True))
            out[:, head] = score / score.sum(axis=1, keepdims=True) @ values[:, head // group]
        return out.reshape(rows, -1)


def greedy(model: Decoder, prompt_ids: list[int], count: int) -> tuple[list[int], Array]:
    """`count` greedy tokens (ties to the lower id, no stop at an end token) and their logits (count, vocab)."""
    session, tokens, logits = Session(model), [], []
    row = session.step(prompt_ids, last=1)[0]
    while True:
        tokens.append(int(np.argmax(row)))  # argmax takes the first of equals, so the lower id
        logits.append(row)
        if len(tokens) == count:
            return tokens, np.stack(logits)
        row = session.step(tokens[-1:])[0]


def teacher_forced(model: Decoder, prompt_ids: list[int], generated_ids: list[int]) -> Array:
    """Logits (len(generated_ids), vocab) that precede each given token, in one pass."""
    tokens = list(prompt_ids) + list(generated_ids[:-1])
    return Session(model).step(tokens, last=len(generated_ids))


def _linear(x: Array, weight: Array, bias: Array | None) -> Array:
    y = x @ weight.T
    return y if bias is None else y + bias
