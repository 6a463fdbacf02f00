"""The guide as a PyTorch module, for training, and greedy decoding to judge it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from tools.guide.shape import Shape

# PyTorch 2.10 and 2.11 have different arguments for causal attention.
_CAUSAL = (
    {"is_causal": True}
    if "is_causal" in inspect.signature(varlen_attn).parameters
    else {"window_size": (-1, 0)}
)


class Rotation:
    """RoPE with tables of cosines and sines. Rotates pairs of neighbours, as in llama's GGUF files."""

    def __init__(self, shape: Shape, device: str) -> None:
        frequencies = shape.rope_base ** (
            -torch.arange(0, shape.head_dim, 2, device=device).double() / shape.head_dim
        )
        angles = torch.outer(torch.arange(shape.context, device=device).double(), frequencies)
        self.cos, self.sin = angles.cos().float(), angles.sin().float()

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (tokens, heads, head_dim), positions int64 (tokens,)."""
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(x)


class Sequences:
    """Where conversations begin in a flat batch of tokens. `starts` is int32 (conversations + 1,). Its last entry
    is the number of tokens, and more entries may repeat it. No conversation is longer than `longest`."""

    def __init__(self, starts: Tensor, longest: int) -> None:
        self.starts, self.longest = starts, longest

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention within each conversation; q, k, v (tokens, heads, head_dim)."""
        if q.is_cuda:
            return varlen_attn(q, k, v, self.starts, self.starts, self.longest, self.longest, **_CAUSAL)
        lengths = self.starts.diff().tolist()
        parts = zip(*(x.transpose(0, 1).unsqueeze(0).split(lengths, 2) for x in (q, k, v)), strict=True)
        mixed = [F.scaled_dot_product_attention(*part, is_causal=True) for part in parts if part[0].shape[2]]
        return torch.cat(mixed, 2).squeeze(0).transpose(0, 1)


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.attn_norm = nn.RMSNorm(shape.dim, shape.epsilon)
        self.attn_q = nn.Linear(shape.dim, wide, bias=False)
        self.attn_k = nn.Linear(shape.dim, narrow, bias=False)
        self.attn_v = nn.Linear(shape.dim, narrow, bias=False)
        self.attn_output = nn.Linear(wide, shape.dim, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.dim, shape.epsilon)
        self.ffn_gate = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.ffn_up = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.ffn_down = nn.Linear(shape.ffn, shape.dim, bias=False)

    def forward(
        self, x: Tensor, positions: Tensor, rotate: Rotation, sequences: Sequences, drop: float
    ) -> Tensor:
        s, h = self.shape, self.attn_norm(x)
        q = rotate(self.attn_q(h).view(-1, s.heads, s.head_dim), positions)
        k = rotate(self.attn_k(h).view(-1, s.kv_heads, s.head_dim), positions)
        v = self.attn_v(h).view(-1, s.kv_heads, s.head_dim)
        shared = s.heads // s.kv_heads
        mixed = sequences.attend(q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1))
        x = x + F.dropout(self.attn_output(mixed.flatten(1)), drop, self.training)
        h = self.ffn_norm(x)
        return x + F.dropout(self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h)), drop, self.training)


class Guide(nn.Module):  # type: ignore[misc]
    """A llama transformer. Its parameters have the names of GGUF files."""

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.vocab, shape.dim)
        self.blk = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.output_norm = nn.RMSNorm(shape.dim, shape.epsilon)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                depth = (2 * shape.layers) ** -0.5 if name.endswith(("output.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * depth)
        self.to(device)
        self._rotate = Rotation(shape, device)

    def forward(self, ids: Tensor, positions: Tensor, sequences: Sequences, drop: float = 0.0) -> Tensor:
        """ids, positions int64 (tokens,) -> hidden states after the last norm (tokens, dim)."""
        x = F.dropout(self.token_embd(ids), drop, self.training)
        for layer in self.blk:
            x = layer(x, positions, self._rotate, sequences, drop)
        return self.output_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.token_embd.weight)


@torch.no_grad()  # type: ignore[untyped-decorator]
def greedy(guide: Guide, prompts: Sequence[Sequence[int]], end: int, max_tokens: int = 96) -> list[list[int]]:
    """The greedy reply to each prompt, without the `end` token, at most `max_tokens` tokens. There is no KV cache: this
    is simple, and fast enough for some hundred prompts."""
    device = guide.token_embd.weight.device
    texts = [list(prompt) for prompt in prompts]
    unfinished = list(range(len(texts)))
    for _ in range(max_tokens):
        if not unfinished:
            break
        flat = torch.tensor([id for i in unfinished for id in texts[i]], device=device)
        lengths = torch.tensor([len(texts[i]) for i in unfinished])
        starts = F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
        positions = torch.cat([torch.arange(n) for n in lengths.tolist()]).to(device)
        hidden = guide(flat, positions, Sequences(starts, int(lengths.max())))
        best = guide.logits(hidden[starts[1:].long() - 1]).argmax(-1).tolist()
        for i, token in zip(unfinished, best, strict=True):
            texts[i].append(token)
        unfinished = [i for i in unfinished if texts[i][-1] != end and len(texts[i]) < guide.shape.context]
    replies = (text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True))
    return [reply[: reply.index(end)] if end in reply else reply for reply in replies]
