"""What is loaded for the options of an engine, and whether it fits into memory, known before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinygrad import Device

from engine.description.architectures import read_spec
from engine.description.assistant import is_assistant
from engine.description.spec import ModelSpec
from engine.formats.gguf import GGUF
from engine.formats.kv_format import KVFormat
from engine.loading.adapters import adapted
from engine.measure.free_memory import free_bytes, host_free_bytes, uses_host_memory
from engine.model.coverage import Target, target_of
from engine.model.draft_head import HeadFile, head_of
from engine.model.draft_model import DraftModel
from engine.model.memory_need import MemoryNeed, check_fits, chosen_context, draft_head_bytes
from engine.protocol.events import EngineOptions
from engine.runtime.pictures import PictureRoom

if TYPE_CHECKING:
    from engine.model.encoder_file import EncoderFile


@dataclass(frozen=True)
class LoadPlan:
    """A model's file and what is loaded beside it. `need` is the model's alone."""

    file: GGUF
    spec: ModelSpec
    target: Target
    kv: KVFormat
    context_length: int
    need: MemoryNeed
    head: HeadFile | None
    draft: DraftModel | None
    encoder: EncoderFile | None

    @property
    def pictures(self) -> PictureRoom | None:
        """What the model's runner needs for pictures, or for texts that it reads as a whole."""
        if self.spec.both_ways:
            return PictureRoom(self.context_length)
        return self.encoder.room(self.spec) if self.encoder else None

    @property
    def has_room_for_file(self) -> bool:
        """Whether the machine's memory has room for the file beside the model, so that the next start need not read
        the disk."""
        needed, free = self.file.file_bytes, host_free_bytes()
        if uses_host_memory(Device.DEFAULT):
            needed += self.need.total_bytes
        return free is None or needed <= free


def plan_load(options: EngineOptions, file: GGUF) -> LoadPlan:
    """`file`: that of `options.model_path`, before adapters change it. Raises ModelFileError, UsageError, and
    BackendError if something does not fit into the memory that is free."""
    file = adapted(file, options.lora)
    spec = read_spec(file)
    encoder = _encoder_file(options.mmproj, spec) if options.mmproj else None
    device, kv = str(Device.DEFAULT), KVFormat.parse(options.kv)
    target = target_of(spec, device, options.kernels)
    set_up = target, options.parallel, kv
    left = free_bytes(device)  # for the model; None: not known

    def leave(n_bytes: int) -> None:
        nonlocal left
        left = None if left is None else left - n_bytes

    leave(encoder.need_bytes if encoder else 0)
    draft_file = GGUF(options.draft) if options.draft else None
    if head := head_of(file, spec, draft_file, options, target):
        leave(draft_head_bytes(spec, head.spec, target, kv))
        spec = head.beside(spec)
    draft = None
    if draft_file and not is_assistant(draft_file) and options.speculate != "heads":
        draft = DraftModel(draft_file, options, device, file, spec.vocab)
    room = left if draft is None or left is None else left - draft.need(None).total_bytes
    asked, at_most = options.context_length, options.context_at_most
    context_length = chosen_context(spec, asked, room, *set_up, at_most=at_most)
    need = check_fits(spec, context_length, left, *set_up)
    if draft:
        leave(need.total_bytes)
        draft.check_fits(context_length, left)
    return LoadPlan(file, spec, target, kv, context_length, need, head, draft, encoder)


def _encoder_file(path: str, spec: ModelSpec) -> EncoderFile:
    """An encoder of pictures. Raises ModelFileError. Its modules take a twentieth of a second of a start."""
    from engine.model.encoder_file import EncoderFile

    return EncoderFile(path, spec)
