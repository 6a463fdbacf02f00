"""Encoders of pictures on our kernels, beside a float32 pass in numpy; and attention of patches."""

import contextlib
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
from tinygrad import dtypes

from engine.description.vision_reader import read_vision
from engine.formats.gguf import GGUF
from engine.kernels.compilation import compile_all
from engine.loading.weights import FileWeights
from engine.runtime.pictures import PictureRoom, Progress
from engine.targets.nvidia import picture_steps, vision
from engine.targets.nvidia.kernels.pictures.patch_attention import PatchTiling, attend_patches
from engine.targets.nvidia.kernels.pictures.patches import PatchHeads, rotate_patches
from engine.targets.nvidia.kernels.products.matmul import fragment_index, fragments_size
from engine.targets.nvidia.runner import NvidiaRunner
from engine.targets.nvidia.vision import NvidiaEncoder
from tests import generated_encoder
from tests.kernels.gpu.buffers import buffer, close, prompt_index, rng, run, zeros
from tests.opened import opened
from tests.reference import Reference, divergence
from tests.reference_encoder import ReferenceEncoder
from tests.seen_tokens import model_with_parts, seen_tokens
from tests.targets.lone_sequence import LoneSequence
from tests.tier import THOROUGH

SIZE = 128


def encoded(encoder, *rgbs):
    return rest_of(encoder.encode(rgbs))


def rest_of(work):
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def begun(work):
    """The progress after the first part of the work. Kernels are compiled before."""
    return next(progress for progress in work if not progress.compiles)


@contextlib.contextmanager
def encoders(kind, **how):
    """One on our kernels, and its float32 reference."""
    with tempfile.TemporaryDirectory() as folder:
        path = generated_encoder.write(Path(folder) / "e.gguf", kind, half=True, **how)
        file = GGUF(path)
        spec = read_vision(file)
        weights = FileWeights(file, list(spec.weights()), lambda _: None)
        yield NvidiaEncoder(weights, spec), ReferenceEncoder(path)


def encoder_of(kind, pictures, **how):
    with encoders(kind, **how) as (encoder, wanted):
        side = encoder.spec.patch * encoder.spec.merge
        for across, down in pictures:  # in tokens
            rgb = rng.integers(0, 256, (down * side, across * side, 3), np.uint8)
            close(encoded(encoder, rgb), wanted(rgb), 4e-3)


def check_an_encoder_with_gates() -> None:
    encoder_of("pixtral", [(2, 2), (1, 2)], side=48)


def check_an_encoder_with_biases() -> None:
    """The first of its layers has a projector of its own."""
    encoder_of("qwen3vl_merger", [(5, 2)], deep=True)


def check_pictures_whose_parts_alternate() -> None:
    """Another picture is begun before one is done."""
    with encoders("pixtral", side=48) as (encoder, wanted), mock.patch.object(picture_steps, "_PART", 1):
        pictures = [rng.integers(0, 256, (16, 24, 3), np.uint8) for _ in range(2)]
        both = [encoder.encode([rgb]) for rgb in pictures]
        assert [begun(work).done for work in both] == [1, 1]
        for work, rgb in zip(both, pictures, strict=True):
            close(rest_of(work), wanted(rgb), 4e-3)


def check_what_is_prepared_for_pictures() -> None:
    """The kernels that are compiled before there is a picture are those that it needs, and it compiles none."""
    kind = "qwen3vl_merger"  # with the kernels of `check_an_encoder_with_biases`
    with encoders(kind, deep=True) as (encoder, _), mock.patch.object(vision, "compile_once") as once:
        assert vision.sizes_of(encoder.spec)[0] == 2 * SIZE
        *_, prepare = encoder.preparations()  # the largest come first
        prepare()
        (_, build), _ = once.call_args
        compile_all(build())
        side = encoder.spec.patch * encoder.spec.merge
        work = encoder.encode([rng.integers(0, 256, (2 * side, 3 * side, 3), np.uint8)])
        assert [progress for progress in work if progress.compiles] == [Progress(0, 1, compiles=True)]


def check_parts_of_pictures() -> None:
    """Layers add parts of a picture's embeddings to its tokens, and nothing is left of them for the next prompt."""
    with tempfile.TemporaryDirectory() as folder:
        path = model_with_parts(Path(folder) / "m.gguf")
        reference, weights = Reference(path), opened(path)
        text = LoneSequence(NvidiaRunner(weights, 64, pictures=PictureRoom(0)))
        for tokens, pictures, embeddings in (seen_tokens(reference.spec, 3), seen_tokens(reference.spec, 0)):
            reference.pictures = embeddings
            text.prefill(tokens[:-1], 0, pictures)
            text.decode(tokens[-1], len(tokens) - 1, pictures)
            assert divergence(reference.logits(tokens)[-1], text.logits()) < 1e-5


def check_an_encoder_with_windows() -> None:
    """Several warps, whose queries are of more windows than one. Two heads of the first encoder have the same keys. In
    the last one, colours of a pixel follow each other."""
    encoder_of("exaone4_5", [(9, 5)], patch=8)
    if THOROUGH:
        encoder_of("qwen2.5vl_merger", [(9, 5)], patch=8)
        encoder_of("youtuvl", [(5, 3)], patch=8)


def check_an_encoder_of_squares() -> None:
    encoder_of("gemma3", [(2, 2)])


def check_an_encoder_of_tiles() -> None:
    """Two of them, one after the other, and a whole picture of another size."""
    with encoders("lfm2") as (encoder, wanted):
        side = encoder.spec.patch * encoder.spec.merge
        sizes = (8, 8), (8, 8), (5, 9)
        rgbs = [rng.integers(0, 256, (down * side, across * side, 3), np.uint8) for across, down in sizes]
        close(encoded(encoder, *rgbs), wanted(*rgbs), 4e-3)


def check_an_encoder_with_a_summary() -> None:
    encoder_of("internvl", [(2, 2)])


def check_an_encoder_with_a_norm_before_its_layers() -> None:
    """And a summary."""
    encoder_of("mlp", [(2, 2)])


def check_an_encoder_of_smoothed_positions() -> None:
    """Whose terms are more than are used."""
    encoder_of("lfm2", [(10, 7)])


def check_an_encoder_whose_rows_have_ends() -> None:
    """And a projector of three products, the first of which merges patches channel by channel."""
    encoder_of("hunyuanvl", [(3, 5)])


def check_an_encoder_of_cubic_positions() -> None:
    encoder_of("kimivl", [(3, 5)])


def check_an_encoder_with_positions_after_its_norm() -> None:
    """And a feed-forward layer in its projector."""
    encoder_of("glm4v", [(3, 5)])


def check_an_encoder_with_two_norms_at_last() -> None:
    encoder_of("dots_ocr", [(3, 5)])


def check_an_encoder_of_fixed_queries() -> None:
    encoder_of("resampler", [(5, 6)], side=24, out=128)


def check_an_encoder_with_convolutions_after_its_layers() -> None:
    encoder_of("step3vl", [(3, 3)])


def check_an_encoder_whose_projector_reads_several_layers() -> None:
    encoder_of("mlp", [(4, 4)], features=(0, 1, 2), side=16)


def check_an_encoder_of_squares_of_patches() -> None:
    """Four of them become one row after the first layer, after attention within them."""
    encoder_of("minicpmv4_6", [(3, 2)])


def check_an_encoder_with_limits() -> None:
    encoder_of("gemma4v", [(3, 2)])


def attended(heads, n, tiling, sizes, has_bias=True):
    """Queries, keys and values, of which the product comes in runs, and their attention."""
    h, width = heads, heads.count * heads.dim
    qkv = rng.standard_normal((n, 3 * width)).astype(np.float32)
    bias, limits = (
        rng.standard_normal(3 * width).astype(np.float32),
        np.float32([[-2, 2], [-1.5, 3], [-9, 1]]),
    )
    norms = rng.uniform(0.5, 1.5, (2, h.dim)).astype(np.float32)
    angles = rng.uniform(-3, 3, (n, h.dim // 2))
    sums = [np.zeros((2, SIZE, size), np.float32) for size in sizes]
    for run_sums, part in zip(sums, np.split(qkv, np.cumsum(sizes)[:-1], 1), strict=True):
        run_sums[0, :n], run_sums[1, :n] = part * 0.25, part * 0.75
    x = (qkv + bias).reshape(n, 3, h.count, h.dim).transpose(1, 2, 0, 3)
    x = np.clip(x, limits[:, 0, None, None, None], limits[:, 1, None, None, None])
    squares = (x * x).mean(-1, keepdims=True)
    rms = [1 if eps is None else np.sqrt(part + eps) for part, eps in zip(squares, h.norms, strict=True)]
    x = np.stack([part / size for part, size in zip(x, rms, strict=True)])
    if h.norms[0]:
        x[:2] *= norms[:, None, None]
    q, k = x[:2]
    if h.turns:
        cos, sin = np.cos(angles), np.sin(angles)
        a, b = np.split(x[:2], 2, -1)
        q, k = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    scores = q @ k.transpose(0, 2, 1) * h.scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = (weights / weights.sum(-1, keepdims=True)) @ x[2]

    def turns(of):
        return [buffer(np.pad(of(angles), ((0, SIZE - n), (0, 0))).astype(np.float32))] if h.turns else []

    count, operands = buffer(np.int32([n, 0, 0, 0])), zeros(3 * h.size(SIZE), dtypes.float16)
    rotate = rotate_patches(h, SIZE, (2,) * len(sizes), sizes, True, True)
    own = [buffer(norms)] if h.norms[0] else []
    run(
        rotate,
        operands,
        *map(buffer, sums),
        buffer(bias),
        buffer(limits),
        *turns(np.cos),
        *turns(np.sin),
        *own,
        count,
    )
    out = zeros(fragments_size(SIZE, width), dtypes.float16)
    run(attend_patches(h, SIZE, tiling, True), out, operands, buffer(np.float32([-0.5, 0.4])), count)
    got = out.numpy()[prompt_index(lambda row, column: fragment_index(row, column, width), n, width)]
    close(got, np.clip(wanted, -0.5, 0.4).transpose(1, 0, 2).reshape(n, width), 2e-3)


def check_attention_of_patches() -> None:
    """Heads with and without norms and rotations; of no multiple of 16 elements; a last step with some keys, and warps
    without queries."""
    attended(PatchHeads(2, 24, (1e-6, 1e-6, None), True, 24**-0.5), 70, PatchTiling(2, 2, 2), (48, 96))
    if THOROUGH:
        attended(PatchHeads(1, 16, (1e-6, 1e-6, 1e-6), True, 1.0), 33, PatchTiling(1, 4, 1), (48,))
        attended(PatchHeads(2, 72, (None,) * 3, False, 72**-0.5), 128, PatchTiling(2, 4, 2), (432,))
