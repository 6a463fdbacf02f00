"""A float32 transformer in numpy, to hold the engine against. It shares no code with the engine: weights come
from the gguf package's reader and its dequantization, and the loops are written as the papers say."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import gguf
import numpy as np


def read_gguf(path: Path) -> gguf.GGUFReader:
    """The gguf package's reader, of bytes that are in memory: of a memory map, it takes twice as long over each of a
    vocabulary's strings."""
    with mock.patch.object(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8)):
        return gguf.GGUFReader(path)


class Reference:
    """llama, qwen2 and qwen3 models of a GGUF file; `logits(tokens)` float32 (n, vocab)."""

    def __init__(self, path: Path) -> None:
        reader = read_gguf(path)
        self.w = {
            t.name: np.asarray(gguf.dequantize(t.data, t.tensor_type), np.float32).reshape(t.shape[::-1])
            for t in reader.tensors
        }
        self.architecture = reader.fields["general.architecture"].contents()

        def value(key):
            return reader.fields[f"{self.architecture}.{key}"].contents()

        self.heads, self.kv_heads = value("attention.head_count"), value("attention.head_count_kv")
        self.layers, self.eps = value("block_count"), value("attention.layer_norm_rms_epsilon")
        self.head_dim = value("attention.key_length")
        self.rope_base = value("rope.freq_base")

    def norm(self, x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * weight

    def rope(self, x):
        """x (n, heads, head_dim): pairs are neighbours in llama's files, halves in the others'."""
        half = self.head_dim // 2
        frequency = self.rope_base ** (-np.arange(half) / half)
        if "rope_freqs.weight" in self.w:
            frequency = frequency / self.w["rope_freqs.weight"]
        angle = (np.arange(len(x))[:, None] * frequency)[:, None, :]
        cos, sin = np.cos(angle), np.sin(angle)
        first, second = (
            (np.s_[..., 0::2], np.s_[..., 1::2])
            if self.architecture == "llama"
            else (np.s_[..., :half], np.s_[..., half:])
        )
        out = np.empty_like(x)
        out[first] = x[first] * cos - x[second] * sin
        out[second] = x[first] * sin + x[second] * cos
        return out

    def logits(self, tokens):
        w, n = self.w, len(tokens)
        x = w["token_embd.weight"][tokens]
        for i in range(self.layers):
            b = f"blk.{i}."

            def project(h, name, b=b):
                y = h @ w[f"{b}{name}.weight"].T
                return y + w[f"{b}{name}.bias"] if f"{b}{name}.bias" in w else y

            h = self.norm(x, w[b + "attn_norm.weight"])
            q = project(h, "attn_q").reshape(n, self.heads, self.head_dim)
            k = project(h, "attn_k").reshape(n, self.kv_heads, self.head_dim)
            v = project(h, "attn_v").reshape(n, self.kv_heads, self.head_dim)
            if b + "attn_q_norm.weight" in w:
                q, k = self.norm(q, w[b + "attn_q_norm.weight"]), self.norm(k, w[b + "attn_k_norm.weight"])
            q, k = self.rope(q), self.rope(k)
            group = self.heads // self.kv_heads
            out = np.empty_like(q)
            for head in range(self.heads):
                scores = q[:, head] @ k[:, head // group].T / np.sqrt(self.head_dim)
                scores[np.triu_indices(n, 1)] = -np.inf
                p = np.exp(scores - scores.max(-1, keepdims=True))
                out[:, head] = p / p.sum(-1, keepdims=True) @ v[:, head // group]
            x = x + project(out.reshape(n, -1), "attn_output")
            h = self.norm(x, w[b + "ffn_norm.weight"])
            gate = project(h, "ffn_gate")
            x = x + project(gate / (1 + np.exp(-gate)) * project(h, "ffn_up"), "ffn_down")
        return self.norm(x, w["output_norm.weight"]) @ w.get("output.weight", w["token_embd.weight"]).T


def log_softmax(x):
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def divergence(p_logits, q_logits):
    """Kullback-Leibler divergence of q from p, in nats, for each row."""
    p, q = log_softmax(p_logits), log_softmax(q_logits)
    return (np.exp(p) * (p - q)).sum(-1)
