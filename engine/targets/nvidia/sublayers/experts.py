"""A mixture of experts on a GPU: router . choice, gate+up . down"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tinygrad import Tensor, dtypes

from engine.description.feed_forward import Experts
from engine.kernels.device_memory import to_device
from engine.measure.kernel_roles import BufferUse
from engine.targets.buffer_uses import BufferUses
from engine.targets.nvidia.decode_step import DecodeMemory, DecodeStep, Division
from engine.targets.nvidia.kernels.products.activation_order import Order
from engine.targets.nvidia.kernels.products.chosen_experts import ChosenExperts
from engine.targets.nvidia.kernels.products.epilogues import (
    STORE,
    STORE_BIASED,
    activate,
    activated,
    activated_in_digits,
    activated_ungated,
    makes_digits,
    routed,
)
from engine.targets.nvidia.kernels.products.expert_choice import Scores
from engine.targets.nvidia.kernels.products.few_experts import block_tiles, few_experts, few_tiles
from engine.targets.nvidia.kernels.products.matmul import ExpertTiles, expert_tiles, fragments_size, matmul
from engine.targets.nvidia.kernels.products.prefill_experts import (
    activate_assignments,
    add_shared,
    choose_experts,
    count_assignments,
    router_logits,
    sort_assignments,
    weigh_rows,
)
from engine.targets.nvidia.kernels.products.small_batch import columns_size
from engine.targets.nvidia.kernels.weights.weight_layout import permuted_size
from engine.targets.nvidia.matrices import Matrix, Product, floats_of
from engine.targets.nvidia.norms import Norm
from engine.targets.nvidia.prompt_step import PromptStep
from engine.targets.nvidia.step import Sums
from engine.targets.nvidia.sublayers.handler import Handler, Loading


def chosen_experts(memory: DecodeMemory, used: int) -> dict[str, Tensor]:
    """The experts that a decode step chose last, int32 (used,), and their probabilities, float32 (used,)."""
    return {
        "experts": memory.buffer("chosen experts", used, dtypes.int32),
        "probabilities": memory.buffer("probabilities", used),
    }


class ExpertsHandler(Handler):
    """The weights of a mixture of experts. `gate_up` has rows of gate and up in turns, unless these differ in type:
    then they are matrices of their own; or those of up alone. With a shared expert, its gate, if any, is a row of the
    router, and the router's product also has the shared expert's gate and up (`shared`). `router_rows`: the router as
    prefill reads it, float32 (experts * dim,), or one row more. `biases`: those of gate and up of each expert, in the
    order of their rows, float32 (experts * 2 * width,); `matrix_biases`: of each matrix of `gate_up` those, None
    without; those of down are float32 (experts * dim,). `scales`: what the experts' results are multiplied by, float32
    (experts,); `choice_bias`, of the same shape. `choices`: how often each expert was chosen, int32 (experts,)."""

    @classmethod
    def lacks(cls, part: Experts) -> str:
        if part.weighed_inputs and (part.used > 1 or part.scoring != "sigmoid"):
            return "experts whose inputs are weighed"
        if part.narrow:
            return "experts narrower than the stream"
        if part.routes_before:
            return "a router that reads the stream before attention"
        return "a router's bias beside a shared expert" if part.shared and part.router_bias else ""

    def __init__(self, part: Experts, loading: Loading) -> None:
        weights, self.part = loading.weights, part
        firsts = [weight for weight, _ in part.firsts]
        alternate = len({weight.type for weight in firsts}) == 1
        self.biases, self.matrix_biases = None, [None, None]
        biases = [weights.vector(bias) for _, bias in part.firsts if bias]
        if biases:
            shaped = [b if alternate else b.reshape(part.count, -1) for b in biases]
            self.biases = to_device(np.stack(shaped, axis=1).reshape(-1))
            self.matrix_biases = [self.biases] if alternate else [to_device(b) for b in biases]
        self.scales, self.choices = loading.vector(part.scales), next(loading.choices)
        self.choice_bias = loading.vector(part.choice_bias)
        groups = part.groups, part.used_groups
        self.scores = Scores(part.scoring, self.choice_bias is not None, part.factor, *groups)
        is_scaled = self.scales is not None
        chosen = ChosenExperts(
            part.used, part.count, False, self.biases is not None, part.least_sum, is_scaled, self.scores,
            weighs_inputs=part.weighed_inputs,
        )  # fmt: skip
        added = ChosenExperts(part.used, part.count, added=True, bias=part.down_bias is not None)
        routers, shared_down = [part.router, *([part.shared_gate] if part.shared_gate else [])], None
        self.router, self.shared = loading.product(*routers), list[Matrix]()
        if part.shared:
            self.shared = loading.gate_up(part.shared)
            self.router = Product([*self.router.matrices, *self.shared])
            (shared_down,) = loading.matrices(part.shared.down)
        rows = np.concatenate([floats_of(weights, weight) for weight in routers])
        self.router_rows = to_device(rows)
        # What the bias of a norm adds to logits is one number for each.
        self._host_rows = rows.reshape(-1, part.router.cols) if weights.spec.centred else None
        self._biases_after: dict[int, Tensor] = {}
        self._ones = to_device(np.ones(max(loading.chunk, 32), np.float32)) if part.weighed_inputs else None
        self.router_bias = loading.vector(part.router_bias)
        self.gate_up = Product(loading.matrices(*firsts, alternate=alternate), chosen)
        is_gated = part.shared_gate is not None
        self.n_logits = part.count + is_gated
        self.down = Product(loading.matrices(part.down), added, shared_down, gated=is_gated)
        self.down_bias = loading.vector(part.down_bias)
        self.products = self.router, self.gate_up, self.down
        self.name, self.ungated = "experts_gate_up", None  # of the first product
        if part.gate is None:
            assert part.activation != "swiglu_oai"
            self.name, self.ungated = "experts_up", part.activation

    def decode(self, step: DecodeStep, norm: Norm) -> None:
        division = step.division(self.gate_up, norm, self.router)
        self.route(step, norm, division)
        x = self.choose(step, norm, self.down, division and division.made)
        logits, shared_x = self.routed(step)
        step.finish(
            self.down,
            x,
            "experts_down",
            **chosen_experts(step.memory, self.part.used),
            shared_x=shared_x,
            router=None if self.part.shared_gate is None else logits,
            biases=self.down_bias,
        )

    def route(self, step: DecodeStep, norm: Norm, division: Division | None = None) -> None:
        """Adds the router, with the gate and up of a shared expert, and with the `division` of another vector."""
        (logits, shared_x), shared, n = self.routed(step), self.part.shared, self.n_logits
        buffers: dict[str, Tensor | None]
        if len(self.shared) == 1 and shared and self.down.shared:
            epilogue = routed(n, shared.activation, 2 if shared.gate else 1)
            buffers = {"logits": logits, "out": shared_x, "input_scale": step.input_scale(self.down.shared)}
        else:
            epilogue = STORE if self.router_bias is None else STORE_BIASED
            buffers = {"out": logits, "bias": self.router_bias}
        step.multiply(self.router, norm, epilogue, buffers, "router", division=division)
        if len(self.shared) == 2 and shared and self.down.shared:
            kernel = activate(shared.width, shared.activation, first=n)
            step.add(kernel, out=shared_x, rows=logits, input_scale=step.input_scale(self.down.shared))

    def choose(
        self, step: DecodeStep, norm: Norm, down: Product, digits: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Adds the choice of experts, with their gate and up; returns the input of the product `down`, or its digits.
        `digits`: those of the vector, if a kernel has made them."""
        part, (logits, _), gate_up = self.part, self.routed(step), self.gate_up
        input_scale, n = step.input_scale(down.matrices[0]), part.up.rows
        buffers: dict[str, Tensor | None] = {
            **chosen_experts(step.memory, part.used),
            "counts": self.choices,
            "router": logits,
            "scales": self.scales,
            "biases": self.biases,
            "choice_bias": self.choice_bias,
        }
        is_one = len(gate_up.matrices) == 1
        is_divided = down.stack.digits and is_one and part.gate is not None
        bits = down.stack.input_scale_bits[0]
        if is_divided and makes_digits(bits, gate_up.schedule.block_rows // 2, n):
            made = step.digits("experts activated", bits, n, part.used)
            buffers |= zip(("digits", "factors"), made, strict=True)
            epilogue = activated_in_digits(part.activation, bits)
            step.multiply(gate_up, norm, epilogue, buffers, self.name, digits=digits)
            return made
        out = step.buffer("experts_activated", part.used * permuted_size(n))
        if is_one:
            buffers |= {"out": out, "input_scale": input_scale}
            epilogue = activated(part.activation) if part.gate else activated_ungated(part.activation, False)
            step.multiply(gate_up, norm, epilogue, buffers, self.name, digits=digits)
        else:
            rows = step.buffer("experts_gate_up", part.used * 2 * n)
            step.multiply(gate_up, norm, STORE, {**buffers, "out": rows}, self.name)
            kernel = activate(n, part.activation, part.used)
            step.add(kernel, out=out, rows=rows, input_scale=input_scale)
        return [out]

    def routed(self, step: DecodeStep) -> tuple[Tensor, Tensor | None]:
        """The router's logits, and with a shared expert the input of its last product. If that one's gate and up are
        matrices of their own, their rows follow the logits."""
        if not self.part.shared:
            return step.buffer("router", self.n_logits), None
        width, apart = self.part.shared.width, len(self.shared) == 2
        logits = step.buffer("router", self.n_logits + 2 * width * apart)
        return logits, step.buffer("shared expert", permuted_size(width))

    def prefill(self, step: PromptStep, norm: Norm) -> Sums:
        return self.compute(step, norm, norm)

    def compute(self, step: PromptStep, norm: Norm, router_norm: Norm) -> Sums:
        """As `prefill`, with another norm before the router. The tokens are sorted by expert, and each tile of them is
        multiplied by its expert's matrices. The products of a token's experts are the partial sums of its result."""
        part, tokens, dim, width = self.part, step.tokens, step.spec.dim, self.part.up.rows
        used, n, add, prompt = part.used, part.count, step.add, step.prompt
        few = few_tiles(tokens, used, n) if len(self.gate_up.matrices) == 1 else None
        tiles = few or expert_tiles(tokens, used, n)
        step.norm(norm, "columns" if few else "rows")
        n_rows = self.n_logits
        logits = step.buffer("router", tokens * n_rows)
        chosen = step.buffer("chosen", tokens * used, dtypes.int32)
        probabilities = step.buffer("probabilities", tokens * used)
        counts = step.buffer("counts", n, dtypes.int32)
        assignments = step.buffer("assignments", tiles.size, dtypes.int32)
        tile_experts = step.buffer("tile_experts", tiles.count, dtypes.int32)
        order: Order = "columns" if few else "fragments"
        size = (columns_size if few else fragments_size)(tiles.size, width)
        activated = step.buffer(f"experts activated in {order}", size, dtypes.float16)
        sums = step.buffer("experts", used * tokens * dim)
        router_bias = self._bias_after(router_norm)
        router = router_logits(tokens, dim, n_rows, step.spec.stream_eps, router_bias is not None)
        weight = step.input_scales.norm_weight(router_norm.weight, 0)
        ins = {"norm": weight, "prompt": prompt, "router": self.router_rows, "bias": router_bias}
        add(router, logits=logits, stream=step.h, **ins)
        stride = n_rows if part.shared_gate else 0
        choose = choose_experts(tokens, used, n, part.least_sum, stride, self.scales is not None, self.scores)
        factors = {"scales": self.scales, "choice_bias": self.choice_bias}
        add(choose, chosen=chosen, probabilities=probabilities, logits=logits, prompt=prompt, **factors)
        add(count_assignments(tiles), counts=counts, choices=self.choices, chosen=chosen)
        lists = {"assignments": assignments, "tile_experts": tile_experts}
        if self._ones is not None:
            weigh = weigh_rows(tokens, dim, "columns" if few else "rows")
            add(weigh, x=step.x, factors=probabilities)
            step.changed()  # so that a shared expert reads it as it was
            probabilities = self._ones
        add(sort_assignments(tiles), **lists, counts=counts, chosen=chosen)
        gate = self._few_gate_up if few else self._gate_up
        gate(step, tiles, activated, lists)
        (matrix,), bias = self.down.matrices, self.down_bias
        if few:
            kernel = few_experts(
                matrix.layout,
                dim,
                width,
                block_tiles(width),
                0,
                "experts_down",
                few,
                has_bias=bias is not None,
            )
        else:
            kernel = matmul(
                matrix.layout, tokens, dim, width, tiles.tiles, False, "experts_down", experts=tiles,
                has_bias=bias is not None,
            )  # fmt: skip
        add(kernel, out=sums, x=activated, **lists, factors=probabilities, bias=bias, planes=matrix.planes)
        if part.shared and self.down.shared:
            step.norm(router_norm)
            out = step.activations("shared expert", part.shared.width)
            if part.shared.gate:
                step.gate(self.shared, part.shared.activation, out)
            else:
                (up,) = self.shared
                step.activate_ungated(up, part.shared.activation, out)
            shared = step.product(self.down.shared, out, "shared down")
            kernel = add_shared(tokens, dim, shared.parts, stride)
            add(kernel, stream=step.h, sums=shared.tensor, logits=logits if stride else None)
        return Sums(sums, used)

    def _bias_after(self, norm: Norm) -> Tensor | None:
        """What is added to the logits of a stream that is normed without the norm's bias."""
        if norm.bias is None or self._host_rows is None:
            return self.router_bias
        if id(norm) not in self._biases_after:
            bias = self._host_rows @ norm.bias
            bias = bias if self.router_bias is None else bias + self.router_bias.numpy()
            self._biases_after[id(norm)] = to_device(bias.astype(np.float32))
        return self._biases_after[id(norm)]

    def _gate_up(
        self, step: PromptStep, tiles: ExpertTiles, activated: Tensor, lists: Mapping[str, Tensor]
    ) -> None:
        """Adds gate and up of the `lists` of assignments; the result is `activated`."""
        tokens, dim, activation, add = step.tokens, step.spec.dim, self.part.activation, step.add
        matrices, halves = self.gate_up.matrices, list[Tensor]()
        for i, (matrix, bias) in enumerate(zip(matrices, self.matrix_biases, strict=False)):
            halved, rows = len(matrices) == 2, matrix.rows // tiles.n
            paired = not halved and self.part.gate is not None
            kernel = matmul(
                matrix.layout, tokens, rows, dim, tiles.tiles, paired, f"{self.name}{i}" if halved else self.name,
                activation, tiles, bias is not None, ungated=self.ungated, halved=halved,
            )  # fmt: skip
            halves.append(step.buffer(f"experts {i}", tiles.size * rows) if halved else activated)
            add(kernel, out=halves[i], x=step.x, **lists, bias=bias, planes=matrix.planes)
        if len(matrices) == 2:
            kernel = activate_assignments(tiles, self.part.up.rows, activation)
            add(kernel, out=activated, gate=halves[0], up=halves[1], **lists)

    def _few_gate_up(
        self, step: PromptStep, tiles: ExpertTiles, activated: Tensor, lists: Mapping[str, Tensor]
    ) -> None:
        """As `_gate_up`, if experts have few tokens."""
        matrix, bias, dim = self.gate_up.single_matrix, self.matrix_biases[0], step.spec.dim
        kernel = few_experts(
            matrix.layout, matrix.rows // tiles.n, dim, block_tiles(dim), 2 if self.part.gate else 1, self.name,
            tiles, self.part.activation, bias is not None,
        )  # fmt: skip
        step.add(kernel, out=activated, x=step.x, **lists, bias=bias, planes=matrix.planes)

    def roles(self, uses: BufferUses) -> None:
        vectors = self.router_bias, self.choices, self.scales, self.choice_bias
        router = self.router_rows, *vectors, *self.router.planes
        uses.add(BufferUse("router"), *router)
        gate_up, down = [self.biases, *self.gate_up.planes], [self.down_bias, *self.down.planes]
        gate_up += [bias for bias in self.matrix_biases if bias is not self.biases]
        uses.add_experts(self.part, self.part.used, gate_up, down)
