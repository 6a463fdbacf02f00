"""A step of a model as the CPU's kernels, which all cores share.

    embed · the kernels of each sublayer (`handlers`) · quantize · head

"quantize" (`quantize_activations`) norms the activations and rounds them to the integers that products take. All that
changes from step to step (tokens, position, number of tokens) is in memory, so a step is one job of the thread pool.
Prefill is the same with tiles of tokens instead of one token, and it ends with the last keys and values, or the last
state, that it leaves for later tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from tinygrad import Tensor

from engine.description.begin import Begin
from engine.targets.cpu.kernels import memory
from engine.targets.cpu.kernels.activations import cap
from engine.targets.cpu.kernels.embedding import embed, embed_from_file
from engine.targets.cpu.kernels.kernel_sequence import KernelSequence
from engine.targets.cpu.model import CPUModel, DraftInput
from engine.targets.cpu.step_builder import StepBuilder


def step_kernels(
    model: CPUModel, tile: int, rows: int = 0, whole: bool = False, most: int = 0
) -> KernelSequence:
    """The kernels of a step. With `rows`, decode of as many tokens at most, each of another sequence, with logits; else
    prefill of as many tiles of tokens as the state says, at `most` so many tokens or a chunk, of the `whole` model or
    of what later tokens need."""
    spec, embedding, step = model.spec, model.embedding, StepBuilder(model, tile, rows, most)
    of_pictures = [] if rows else model.of_pictures
    draft_input, embedded = model.draft_input, step.x
    if any(isinstance(sublayer.operator, Begin) for sublayer in spec.sublayers):
        step.embeddings = embedded = step.rows("embeddings", spec.dim)
    elif embedding.cols != spec.dim or spec.centred or model.added_tables:
        embedded = step.rows("embedded", embedding.cols)
    step.add(
        embed(embedding.layout, tile, spec.embedding_scale, bool(of_pictures)),
        embedded,
        model.sizes(embedding.rows, embedding.cols // embedding.layout.block),
        *step.state,
        model.tokens,
        embedding.stream,
        *of_pictures[:1],
    )
    _embed_layers(model, step)
    if draft_input:
        _join(draft_input, step, embedded)
    elif spec.centred or model.added_tables:
        step.add_rows([embedded, *_added_rows(model, step)], begins=True)
    if model.embedding_norm is not None:
        normed = step.rows("embedded", spec.dim)
        rows_read = step.x if step.embeddings is None else step.embeddings
        step.add_normed(normed, rows_read, model.embedding_norm, added=False)
        step.add_rows([normed], begins=True)
    step.sequence.output(step.x)
    last = None if rows or whole else model.layers[spec.last_keeping]
    waiting, post_eps = list[Tensor](), spec.post_eps or None
    for layer, (sublayer, is_added_later) in zip(model.layers, spec.blocks, strict=True):
        if layer.renewed is not None:
            step.add_normed(step.x, step.x, layer.renewed, added=False, eps=spec.stream_eps)
        if layer is last:
            layer.handler.keep(step)
            break
        if sublayer.replaces and layer.norm is not None:
            step.add_normed(step.x, step.x, layer.norm, added=False, eps=spec.stream_eps)
        waits = spec.centred or is_added_later or sublayer.beside
        is_mixed = waits or layer.post_norm is not None
        step.mixed = step.rows(f"mixed{len(waiting)}", spec.dim) if is_mixed else None
        layer.handler.add_kernels(step)
        if step.mixed is not None and waits:
            if layer.post_norm is not None:
                step.add_normed(step.mixed, step.mixed, layer.post_norm, added=False, eps=post_eps)
            waiting.append(step.mixed)
        elif step.mixed is not None and layer.post_norm is not None:
            step.add_normed(step.x, step.mixed, layer.post_norm, layer.scale, eps=post_eps)
        if waiting and not is_added_later:
            step.add_rows(waiting, factor=sublayer.factor)
            waiting = []
        if sublayer.picture_part and of_pictures:
            step.add_rows([of_pictures[sublayer.picture_part]])
        step.sequence.output(step.x)
    if rows:
        back = [draft_input.back] if draft_input and draft_input.back else []
        inputs = step.quantize(step.x, [model.head, *back], norm=model.output_norm)
        step.multiply(model.logits, model.head, inputs, added=model.head_bias)
        if draft_input and draft_input.back:
            step.multiply(draft_input.hidden, draft_input.back, inputs)
        if spec.softcap:
            vectors = model.sizes(memory.view(model.logits).size // model.lanes)
            step.add(cap(spec.softcap, model.lanes), model.logits, vectors)
    return step.sequence


def _join(draft_input: DraftInput, step: StepBuilder, embedded: Tensor) -> None:
    """Adds the kernels that begin the stream of a draft head (`engine.description.spec.Join`, `Narrowing`)."""
    of_embedding = step.rows("joined embedding", draft_input.of_embedding.rows)
    inputs = step.quantize(embedded, [draft_input.of_embedding], norm=draft_input.embedding_norm)
    step.multiply(of_embedding, draft_input.of_embedding, inputs)
    inputs = step.quantize(draft_input.hidden, [draft_input.of_hidden], norm=draft_input.hidden_norm)
    step.multiply(step.x, draft_input.of_hidden, inputs, added=of_embedding)


def _added_rows(model: CPUModel, step: StepBuilder) -> Iterator[Tensor]:
    """Adds the kernels of what is added to embeddings (`ModelSpec.added_tables`)."""
    for i, (matrix, numbers, stride) in enumerate(model.added_tables):
        rows, sizes = step.rows(f"added{i}", matrix.cols), (matrix.rows, matrix.cols // matrix.layout.block)
        kernel = embed(matrix.layout, step.tile, stride=stride)
        step.add(kernel, rows, model.sizes(*sizes), *step.state, numbers, matrix.stream)
        yield rows


def _embed_layers(model: CPUModel, step: StepBuilder) -> None:
    """Adds the kernels of what the embeddings of layers are made of, if there are any."""
    if not (tables := model.layer_tables):
        return
    table, projected = tables.table, step.rows("layer projections", tables.projection.rows)
    rows = step.rows("layer rows", table.cols)
    kernel = embed_from_file(table.type, model.lanes, step.tile, tables.size**0.5)
    step.add(kernel, rows, table.shape, *step.state, model.tokens, table.data)
    step.multiply(projected, tables.projection, step.quantize(step.x, [tables.projection]))
    step.of_layers = [projected, tables.norm, rows]
