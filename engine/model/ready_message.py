"""What an engine says of its model once it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tinygrad import Device

from engine.cache.start_trial import start_trials
from engine.description import file_summary
from engine.devices.device_name import device_name
from engine.formats.templates.prompt import PromptEncoder
from engine.formats.templates.template import ChatTemplate
from engine.loading import packed_weights_cache
from engine.loading.adapters import parse_adapters
from engine.loading.weights import blank_end
from engine.model.coverage import runs_as_graph_because
from engine.model.draft_head import NO_CHECKS, NO_HEAD
from engine.model.load_plan import LoadPlan
from engine.model.memory_need import squeezed_because
from engine.protocol.events import EngineOptions, ModelInfo, Ready
from engine.runtime.model_runner import ModelRunner


def ready_message(
    plan: LoadPlan,
    options: EngineOptions,
    runner: ModelRunner,
    prompts: PromptEncoder,
    counts_experts: bool,
    guesses_by_head: bool,
) -> Ready:
    """`counts_experts`: whether `ExpertChoices` will be reported. `guesses_by_head`: whether a draft head or an
    assistant is loaded. How long loading took is for others to fill in."""
    spec, kv = plan.spec, plan.kv
    experts = spec.experts[0] if counts_experts else None
    return Ready(
        model=_model_info(plan, options, prompts.template),
        backend=str(Device.DEFAULT),
        device_name=device_name(str(Device.DEFAULT)),
        context_length=plan.context_length,
        load_ms=0.0,
        cache_bytes=plan.need.cache_bytes,
        kv=kv.value,
        is_squeezed=bool(squeezed_because(spec, options.context_length, plan.context_length)),
        warnings=(*prompts.warnings, *filter(None, _warnings(plan, options, runner, guesses_by_head))),
        parallel=runner.parallel,
        weight_bytes_per_token=spec.weight_bytes_per_token,
        kv_bytes_per_token=spec.kv_bytes_per_token(windowed=False, kv=kv),
        window=spec.window,
        window_kv_bytes_per_token=spec.kv_bytes_per_token(windowed=True, kv=kv),
        state_bytes=spec.state_bytes,
        states_bytes=plan.need.states_bytes,
        checkpoints=runner.state_slots,
        experts=experts.count if experts else 0,
        experts_used=experts.used if experts else 0,
    )


def _model_info(plan: LoadPlan, options: EngineOptions, template: ChatTemplate) -> ModelInfo:
    file, spec = plan.file, plan.spec
    return ModelInfo(
        name=spec.name,
        architecture=spec.architecture,
        quantization=file_summary.quantization(file),
        parameters=file_summary.parameters(file),
        file_bytes=file.file_bytes,
        trained_context=spec.trained_context,
        thinks=template.thinks,
        takes_effort=template.takes_effort,
        sees=plan.encoder is not None,
        adapters=tuple(adapter.name for adapter in parse_adapters(options.lora)),
    )


def _warnings(
    plan: LoadPlan, options: EngineOptions, runner: ModelRunner, guesses_by_head: bool
) -> Iterator[str]:
    """Sentences about what a user would not expect of this model, and empty ones."""
    spec, device, is_graph = plan.spec, str(Device.DEFAULT), options.kernels == "graph"
    as_graph = "" if is_graph else runs_as_graph_because(spec, device)
    yield blank_end(plan.file, spec)
    if spec.both_ways:
        yield f"{spec.name} makes embeddings of texts, and answers nothing."
    if options.chip:
        yield f"The kernels are those of {options.chip}, as if this were such a GPU."
    yield as_graph
    packs = device == "CPU" and not as_graph and not is_graph
    keeps = packs and options.keep_packed and not options.lora
    if keeps and not packed_weights_cache.cached_files(Path(options.model_path)):
        yield "The packed weights are not kept: the disk has no room for them, or cannot be written."
    if start_trials.dropped:
        yield "What a search of schedules found made an earlier start fail, so it is not used any more."
    yield squeezed_because(spec, options.context_length, plan.context_length)
    for encoder in spec.encoders:
        yield f"Its {encoder} encoder is not loaded: orin-chat gives it text alone."
    if plan.draft and not runner.check_rows:
        yield NO_CHECKS
    is_asked_for = options.speculate == "heads" or (plan.head and plan.head.is_assistant)
    if is_asked_for and not guesses_by_head:
        yield NO_CHECKS if plan.head else NO_HEAD
