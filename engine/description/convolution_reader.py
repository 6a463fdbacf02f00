"""Reads the encoder of Gemma 3n: MobileNet V5 (tools/mtmd/models/mobilenetv5.cpp of llama.cpp, mobilenetv5.py of
timm)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from engine.description.projector_reader import ProjectorReader
from engine.description.sublayers import Vector, Weight
from engine.description.vision import ConvolutionNet, ImageAttention, ImageBlock, ImageStep, Norm
from engine.formats.gguf import damaged

TOKENS_A_SIDE = 16
"""Rows and columns of tokens, whatever the size of a picture."""
_STAGES, _READ_STAGES = 4, (2, 3)
_EPS = 1e-6
_MOST_BLOCKS, _MOST_KERNEL, _MOST_CHANNELS = 1 << 9, 9, 1 << 14
_MOST_ELEMENTS = 1 << 27
"""Of what a step computes at once. Gemma 3n's largest has a third of them."""


def read_net(reader: ProjectorReader, side: int) -> ConvolutionNet:
    """`side`: of pictures in pixels. Raises ModelFileError."""
    net = _Net(reader, side)
    stem = net.step("v.conv_stem.conv", "v.conv_stem.bn", stride=2, activates=True)
    blocks, read = [ImageBlock((stem,))], list[int]()
    sides, widths = list[int](), list[int]()
    for stage in range(_STAGES):
        found = list(net.blocks(stage))
        if not found or len(blocks) + len(found) > _MOST_BLOCKS:
            raise damaged(reader.file.path, f"its stage {stage} has {len(found)} blocks")
        blocks += found
        if stage in _READ_STAGES:
            read.append(len(blocks) - 1)
            sides.append(net.side)
            widths.append(net.channels)
    if any(sides[0] % n for n in sides) or sides[0] % TOKENS_A_SIDE or side % TOKENS_A_SIDE:
        raise damaged(reader.file.path, f"its pictures of {side} pixels a side become {sides} rows")
    net.side, net.channels = sides[0], sum(widths)
    last = ImageBlock(
        (
            net.step("v.msfa.ffn.pw_exp.conv", "v.msfa.ffn.pw_exp.bn", activates=True),
            net.step("v.msfa.ffn.pw_proj.conv", "v.msfa.ffn.pw_proj.bn"),
        )
    )
    if net.channels != reader.dim:
        raise damaged(reader.file.path, f"its net makes {net.channels} elements of {sum(widths)}")
    return ConvolutionNet(tuple(blocks), tuple(read), last, TOKENS_A_SIDE, net.norm("v.msfa.norm"))


class _Net:
    """Reads blocks one after the other: images have so many `channels` and rows, `side`, before the next one."""

    def __init__(self, reader: ProjectorReader, side: int) -> None:
        self._reader, self.side, self.channels = reader, side, 3

    def blocks(self, stage: int) -> Iterator[ImageBlock]:
        """The blocks of a stage, as many as the file has."""
        for i in range(_MOST_BLOCKS):
            prefix, before = f"v.blk.{stage}.{i}.", (self.side, self.channels)
            stride = 1 if i else 2
            if self._has(f"{prefix}conv_exp"):
                exp = self.step(f"{prefix}conv_exp", f"{prefix}bn1", stride=stride, activates=True)
                yield self._block((exp, self.step(f"{prefix}conv_pwl", f"{prefix}bn2")), before, None)
            elif self._has(f"{prefix}attn.query.proj"):
                attention = self._attention(prefix)
                yield self._block((attention,), before, self._scale(prefix))
            elif self._has(f"{prefix}dw_start.conv") or self._has(f"{prefix}pw_exp.conv"):
                yield self._block(tuple(self._inverted(prefix, stride)), before, self._scale(prefix))
            else:
                return

    def step(
        self, name: str, norm: str, stride: int = 1, deep: bool = False, activates: bool = False
    ) -> ImageStep:
        """A convolution, with the norm if the file has it."""
        reader, tensor = self._reader, f"{name}.weight"
        info = reader.file.tensors.get(tensor)
        shape = info.shape if info and len(info.shape) == 4 else (0,) * 4
        rows, kernel = shape[0], shape[-1]
        if not 0 < rows <= _MOST_CHANNELS or kernel % 2 == 0 or kernel > _MOST_KERNEL:
            raise damaged(reader.file.path, f"{tensor} has the shape {shape}")
        cols = 1 if deep else self.channels
        type = reader.check(tensor, (self.channels if deep else rows, cols, kernel, kernel))
        weight = Weight(tensor, rows, cols * kernel**2, type)
        bias = self._flat(f"{name}.bias", rows)
        self.side, self.channels = -(-self.side // stride), rows
        self._check_size(self.side**2 * max(rows, cols * kernel**2), tensor)
        return ImageStep(weight, kernel, stride, deep, bias, self.norm(norm), activates)

    def _check_size(self, elements: int, name: str) -> None:
        if elements > _MOST_ELEMENTS:
            raise damaged(self._reader.file.path, f"{name} would compute {elements:,} numbers at once")

    def norm(self, name: str) -> Norm | None:
        """A norm over all channels, if the file has it."""
        return Norm(_EPS, self._reader.required(f"{name}.weight", self.channels)) if self._has(name) else None

    def _has(self, name: str) -> bool:
        return self._reader.has(f"{name}.weight")

    def _block(
        self, steps: tuple[ImageStep | ImageAttention, ...], before: tuple[int, int], scale: Vector | None
    ) -> ImageBlock:
        return ImageBlock(steps, scale, before == (self.side, self.channels))

    def _inverted(self, prefix: str, stride: int) -> Iterator[ImageStep]:
        if self._has(f"{prefix}dw_start.conv"):
            yield self.step(f"{prefix}dw_start.conv", f"{prefix}dw_start.bn", deep=True)
        if self._has(f"{prefix}pw_exp.conv"):
            yield self.step(f"{prefix}pw_exp.conv", f"{prefix}pw_exp.bn", activates=True)
        if self._has(f"{prefix}dw_mid.conv"):
            yield self.step(f"{prefix}dw_mid.conv", f"{prefix}dw_mid.bn", stride, deep=True, activates=True)
        if self._has(f"{prefix}pw_proj.conv"):
            yield self.step(f"{prefix}pw_proj.conv", f"{prefix}pw_proj.bn")

    def _attention(self, prefix: str) -> ImageAttention:
        side, channels = self.side, self.channels

        def made(name: str) -> tuple[ImageStep, ...]:
            self.side, self.channels, steps = side, channels, list[ImageStep]()
            if self._has(f"{prefix}attn.{name}.down_conv"):
                steps.append(
                    self.step(f"{prefix}attn.{name}.down_conv", f"{prefix}attn.{name}.norm", 2, deep=True)
                )
            return (*steps, self.step(f"{prefix}attn.{name}.proj", ""))

        norm = Norm(_EPS, self._reader.required(f"{prefix}norm.weight", channels))
        (q,), k, v = (made(name) for name in ("query", "key", "value"))
        width, head = q.weight.rows, k[-1].weight.rows
        if width % head or v[-1].weight.rows != head or len(k) != len(v):
            raise damaged(
                self._reader.file.path, f"{prefix}attn has queries of {width} elements and keys of {head}"
            )
        self._check_size(width // head * side**2 * self.side**2, f"{prefix}attn")  # of keys and values
        self.side, self.channels = side, width
        return ImageAttention(norm, q, k, v, self.step(f"{prefix}attn.output.proj", ""))

    def _scale(self, prefix: str) -> Vector | None:
        return self._flat(f"{prefix}layer_scale.gamma", self.channels)

    def _flat(self, tensor: str, size: int) -> Vector | None:
        """A vector, which files have as (1, size, 1, 1)."""
        info = self._reader.file.tensors.get(tensor)
        if info is None:
            return None
        is_one = math.prod(info.shape) == size and len(info.shape) <= 4
        return self._reader.required(tensor, *(info.shape if is_one else (size,)))
