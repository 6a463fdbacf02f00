"""The feed-forward layers of a model and their mixtures of experts, read from a file."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from engine.description.checked_file import MOST
from engine.description.feed_forward import Activation, Dense, Experts, Scoring, SideBySide, SiluLimits
from engine.description.head_reader import HeadReader
from engine.description.sublayers import Vector, Weight
from engine.errors import ModelFileError
from engine.formats.gguf import damaged


class FeedForwardReader(HeadReader):
    """Reads feed-forward layers. All methods raise ModelFileError."""

    def feed_forward(self, i: int, prefix: str) -> Dense | Experts:
        if self.has(f"{prefix}ffn_gate_inp.weight"):
            return self.experts(i, prefix)
        width = self.size_of_layer("feed_forward_length", i)
        layer = self.dense(prefix, width // 2 if self.family.halved_width else width)
        return replace(layer, curve=self.curve(i)) if self.family.curved else layer

    def curve(self, i: int) -> tuple[float, ...]:
        """See `Dense`. The files have n and p before a softplus, and n without b (ggml_xielu)."""
        values = (self._number_of_layer(f"xielu.{name}", i) for name in ("alpha_n", "alpha_p", "beta", "eps"))
        n, p, b, e = values
        return b + math.log1p(math.exp(min(n, 80))), math.log1p(math.exp(min(p, 80))), b, e

    def _number_of_layer(self, key: str, i: int) -> float:
        """A number that the file has for all layers, or for each."""
        numbers = self.file.metadata.get(key, 0.0)
        if isinstance(numbers, np.ndarray) and (i >= len(numbers) or numbers.dtype.kind != "f"):
            raise damaged(self.file.path, f"{key} has no number of layer {i}")
        number = numbers[i] if isinstance(numbers, np.ndarray) else numbers
        if not isinstance(number, float | np.floating) or not abs(float(number)) <= MOST:
            raise damaged(self.file.path, f"{key} is no number")
        return float(number)

    def beside(self, i: int, prefix: str) -> SideBySide:
        """The feed-forward layer and the mixture of experts that layer i has side by side (Gemma 4)."""

        def norm(name: str) -> Vector:
            return self.required(f"{prefix}{name}.weight", self.dim)

        scale = self.required(f"{prefix}ffn_gate_inp.scale", self.dim)
        return SideBySide(
            dense=self.dense(prefix, self.size_of_layer("feed_forward_length", i)),
            dense_norm=norm("ffn_norm"),
            dense_post_norm=norm("post_ffw_norm_1"),
            experts=self.experts(i, prefix),
            experts_norm=norm("pre_ffw_norm_2"),
            experts_post_norm=norm("post_ffw_norm_2"),
            router_scale=replace(scale, factor=self.dim**-0.5),
        )

    def dense(self, prefix: str, width: int, suffix: str = "") -> Dense:
        """The feed-forward layer. Without ffn_gate, the rows of gate and then of up are one tensor (phi3),
        unless the family has no gates."""
        dim = self.dim
        down = self.weight(f"{prefix}ffn_down{suffix}", dim, width)
        gate: Weight | None
        if self.has(f"{prefix}ffn_gate{suffix}.weight"):
            gate, up = (self.weight(f"{prefix}ffn_{x}{suffix}", width, dim) for x in ("gate", "up"))
        elif self.family.ungated:
            gate, up = None, self.weight(f"{prefix}ffn_up{suffix}", width, dim)
        else:
            gate, up = (
                self.weight(f"{prefix}ffn_up{suffix}", width, dim, first, 2 * width) for first in (0, width)
            )
        gate_bias, up_bias, down_bias = (
            self.vector(f"{prefix}ffn_{x}{suffix}.bias", n)
            for x, n in (("gate", width), ("up", width), ("down", dim))
        )
        hidden_norm = self.vector(f"{prefix}ffn_sub_norm{suffix}.weight", width)
        return Dense(
            gate, up, down, self.family.activation, gate_bias, up_bias, down_bias, hidden_norm=hidden_norm
        )

    def activation(self, i: int, of: str) -> Activation:
        """The activation of the experts of layer i, or of the shared one. The file may have a limit of each layer, 0
        for none: of gates, or of their SiLU (build_moe_ffn and build_ffn in src/llama-graph.cpp of llama.cpp)."""
        limit = self._number_of_layer(self.key(f"swiglu_clamp_{of}"), i)
        if limit <= 1e-6 or self.family.activation != "silu":
            return self.family.activation
        return SiluLimits(inverse_silu(limit) if self.family.limits_silu else limit, limit)

    def sparsity(self, i: int) -> float:
        """See `Dense`. The file has one for each layer; of a layer without, it is no finite number, or nothing that is
        above 0."""
        key = self.key("activation_sparsity_scale")
        sparsities = self.file.metadata.get(key)
        if not isinstance(sparsities, np.ndarray):
            return 0.0
        if i >= len(sparsities) or sparsities.dtype.kind != "f":
            raise damaged(self.file.path, f"{key} has no number of layer {i}")
        return float(sparsities[i]) if 0 < sparsities[i] <= MOST else 0.0

    def experts(self, i: int, prefix: str) -> Experts:
        """A mixture of experts. Older files do not say the experts' width. Of each expert, the rows of gate and then of
        up may be one tensor."""
        dim, count, used = self.dim, self.size("expert_count"), self.size_of_layer("expert_used_count", i)
        if not count > 1 or used > count:
            raise damaged(self.file.path, f"it chooses {used} of {count} experts")
        weighed_inputs = self.family.weighed_inputs
        if weighed_inputs and used > 1:
            raise ModelFileError(
                f"{self.name} weighs what {used} experts of a token read, which orin-chat does not run.",
                "Choose another model.",
            )
        if self.has(f"{prefix}ffn_down.0.weight"):
            raise ModelFileError(
                f"{self.name} is an old file, in which each expert has matrices of its own.",
                "Get a newer file of this model: those since April 2024 have them together.",
            )
        of_down = self.file.tensors.get(f"{prefix}ffn_down_exps.weight")
        unsaid = of_down.shape[-1] if of_down else None
        width = self.size_of_layer("expert_feed_forward_length", i, unsaid)
        narrow = self.narrow(prefix)
        inner = narrow[0].rows if narrow else dim
        (gate, gate_bias), (up, up_bias) = self.firsts_of_experts(prefix, count, width, inner)
        down, down_bias = self.of_experts(prefix, "down", count, inner, width)
        shared = self.file.tensors.get(f"{prefix}ffn_down_shexp.weight")
        has_gate = self.has(f"{prefix}ffn_gate_inp_shexp.weight")
        shared_layer = self.dense(prefix, shared.shape[-1], "_shexp") if shared else None
        if shared_layer:
            shared_layer = replace(shared_layer, activation=self.activation(i, "shexp"))
        groups, used_groups = self.groups(count, used)
        router = self.weight(f"{prefix}ffn_gate_inp", count, dim)
        factor = self.number("expert_weights_scale", 1.0) or 1.0
        shared_gate = self.weight(f"{prefix}ffn_gate_inp_shexp", 1, dim) if has_gate else None
        if shared and self.family.averages_shared:  # sigmoid(0) is a half
            factor, shared_gate = factor / 2, replace(router, rows=1, blank=True)
        return Experts(
            router=router,
            router_bias=self.vector(f"{prefix}ffn_gate_inp.bias", count),
            gate=gate, up=up, down=down, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias,
            used=used, activation=self.activation(i, "exp"),
            renormalised=self.file.get(self.key("expert_weights_norm"), bool, self.family.renormalised),
            scales=None if down.scale else self.vector(f"{prefix}ffn_down_exps.scale", count),
            shared=shared_layer,
            shared_gate=shared_gate,
            scoring=self.scoring(prefix), choice_bias=self.vector(self.choice_bias(prefix), count),
            factor=factor, groups=groups, used_groups=used_groups,
            weighed_inputs=weighed_inputs, routes_before=self.family.routes_before, narrow=narrow,
        )  # fmt: skip

    def narrow(self, prefix: str) -> tuple[Weight, Weight] | None:
        """What is before and after experts that are narrower than the stream (Nemotron 3 Super)."""
        of_latent = self.file.tensors.get(f"{prefix}ffn_latent_down.weight")
        if not (self.family.lone_sublayers and of_latent):
            return None
        inner = self.size("moe_latent_size", of_latent.shape[0])
        down = self.weight(f"{prefix}ffn_latent_down", inner, self.dim)
        return down, self.weight(f"{prefix}ffn_latent_up", self.dim, inner)

    def firsts_of_experts(
        self, prefix: str, count: int, width: int, inner: int
    ) -> tuple[tuple[Weight | None, Vector | None], tuple[Weight, Vector | None]]:
        """Gate, if there is one, and up of all experts, with their biases."""
        if self.family.ungated:
            return (None, None), self.of_experts(prefix, "up", count, width, inner)
        whole, fused = 2 * width, f"{prefix}ffn_gate_up_exps"
        if self.has(f"{fused}.weight"):
            gate, up = (
                self.weight(fused, width, inner, first, whole, experts=count, every=whole, run=width)
                for first in (0, width)
            )
            return (gate, None), (up, None)
        of_gate, of_up = (self.of_experts(prefix, x, count, width, inner) for x in ("gate", "up"))
        return of_gate, of_up

    def of_experts(
        self, prefix: str, x: str, count: int, rows: int, cols: int
    ) -> tuple[Weight, Vector | None]:
        """A matrix of all experts, and its bias."""
        tensor = f"{prefix}ffn_{x}_exps"
        bias = self.vector(f"{tensor}.bias", rows, experts=count)
        return self.weight(tensor, rows, cols, experts=count), bias

    def choice_bias(self, prefix: str) -> str:
        """The tensor that is added to the experts' probabilities for the choice; its name has no suffix in hy_v3."""
        tensor = f"{prefix}exp_probs_b"
        return tensor if self.has(tensor) else f"{tensor}.bias"

    def scoring(self, prefix: str) -> Scoring:
        """What makes the probabilities of experts: llama_expert_gating_func_type in src/llama-hparams.h of
        llama.cpp; 0 stands for none said."""
        is_biased = self.has(self.choice_bias(prefix))
        unsaid = self.family.biased_scoring or self.family.scoring if is_biased else self.family.scoring
        known: dict[int, Scoring] = {0: unsaid, 1: "softmax", 2: "sigmoid"}
        kind = self.file.get(self.key("expert_gating_func"), int, 0)
        if kind not in known:
            raise ModelFileError(
                f"{self.name} scores its experts by function {kind}, which orin-chat does not run.",
                "Choose another model.",
            )
        return known[kind]

    def groups(self, count: int, used: int) -> tuple[int, int]:
        """The groups of experts, and how many of them are used: 1 and 1 if all experts are compared."""
        groups = self.file.get(self.key("expert_group_count"), int, 0)
        if groups <= 1:
            return 1, 1
        used_groups, each = self.size("expert_group_used_count"), count // groups
        if count % groups or each < 2 or used_groups > groups or used > used_groups * each:
            raise damaged(self.file.path, f"it chooses {used_groups} of {groups} groups of {count} experts")
        return groups, used_groups


def inverse_silu(value: float) -> float:
    """The positive number whose SiLU is `value`, a positive one: SiLU grows there, so it is at most `value` where its
    argument is at most this number."""
    x = value
    for _ in range(50):  # where x is found, this has a slope of x / (1 + e**x), at most 0.28
        x = value * (1 + math.exp(-x))
    return x
