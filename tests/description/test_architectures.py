"""The description of a model that is read from its file, the figures that follow from it, and what is refused."""

import dataclasses
import math
import re

import numpy as np
import pytest

from engine.description.architectures import read_spec
from engine.description.attention import LatentAttention
from engine.description.families import ARCHITECTURES
from engine.description.feed_forward import Dense
from engine.description.spec import ModelSpec
from engine.errors import ModelFileError, UsageError
from engine.formats.gguf import GGUF
from engine.formats.ollama_names import usual_names
from engine.formats.rope_order import HeadOrder
from engine.model.memory_need import chosen_context
from tests import generated_families, generated_model

LAYERS, DIM, KV_SIZE = 3, 64, 32
SHAPE = {"layers": LAYERS, "dim": DIM, "heads": 4, "kv_heads": 2, "ffn": 96, "quant": "F16"}


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    """The path of a file of an architecture, by its name."""
    folder = tmp_path_factory.mktemp("models")
    paths = {}

    def path(architecture):
        if architecture not in paths:
            paths[architecture] = folder / architecture / "model.gguf"
            generated_model.write(paths[architecture], architecture=architecture, **SHAPE)
        return paths[architecture]

    return path


def read(path, tensors=None, **metadata) -> ModelSpec:
    """The description of a file that is changed: `tensors` have other shapes, or are taken out (None), or are put in; a
    key of the metadata is written with "__" in place of ".", and taken out with None."""
    with GGUF(path) as file:
        changes = {key.replace("__", "."): value for key, value in metadata.items()}
        changed = {key: v for key, v in {**file.metadata, **changes}.items() if v is not None}
        all_tensors = dict(file.tensors)
        for name, shape in (tensors or {}).items():
            like = all_tensors.pop(name, file.tensors["output_norm.weight"])
            if shape is not None:
                all_tensors[name] = dataclasses.replace(like, name=name, shape=shape)
        file.metadata, file.tensors = usual_names(changed, all_tensors)
        return read_spec(file)


# in the metadata's stead, with a matrix, or not at all
NOT_READ = r"rope_f|blk\.\d\.(attn_output|ffn_down)\.scale|blk\.0\.time_mix_v\d"


@pytest.mark.parametrize("architecture", generated_families.ARCHITECTURES)
def test_all_that_a_file_holds_is_described_once(path_of, architecture):
    spec = read(path_of(architecture))
    assert spec.architecture in ARCHITECTURES
    with GGUF(path_of(architecture)) as file:
        held = {name: info for name, info in file.tensors.items() if not re.match(NOT_READ, name)}
    if spec.reads_all_to:  # what would choose tokens above that is left out
        held = {name: info for name, info in held.items() if ".indexer." not in name}
    matrices = {
        name
        for name, info in held.items()
        if (
            len(info.shape) > 1
            and name.endswith(".weight")
            and not re.search(
                r"(conv|conv1d(_[qkv])?|ssm_norm|_coef|attn_[qk]_norm|lerp_fused|mix_first)\.weight$",
                name,
            )
        )
        or name.endswith("gate_inp_shexp.weight")
    }
    runs: dict[str, list[tuple[int, int]]] = {}  # of elements: the first, and the end
    weights = [weight for weight in spec.weights() if not weight.blank]
    for weight in weights:
        rows, run, cols = weight.experts * weight.rows, weight.run, weight.cols
        if weight.transposed:
            rows, run, cols = weight.experts * cols, cols, weight.rows
        run, every = run or rows, weight.every or rows
        firsts = [(weight.first + i // run * every) * cols for i in range(0, rows, run)]
        runs.setdefault(weight.tensor, []).extend((first, first + run * cols) for first in firsts)
    assert runs.keys() == matrices
    read_vectors = [vector for vector in spec.vectors() if vector.tensor]
    for vector in read_vectors:
        runs.setdefault(vector.tensor, []).append((vector.first, vector.first + vector.size // vector.each))
    assert runs.keys() == held.keys()
    for name, parts in runs.items():
        firsts, ends = zip(*sorted(parts), strict=True)
        assert (*firsts, math.prod(held[name].shape)) == (0, *ends), name
    turned = [weight for weight in weights if weight.transposed]  # they are floats
    of_rows = ((held[w.tensor], w.experts * w.cols) for w in turned)
    in_file = sum(weight.n_bytes for weight in weights if not weight.transposed)
    in_file += sum(info.n_bytes * rows // info.shape[0] for info, rows in of_rows)
    assert in_file == sum(held[name].n_bytes for name in matrices)
    assert sum(4 * (vector.size // vector.each) for vector in read_vectors) == sum(
        info.n_bytes for name, info in held.items() if name not in matrices
    )


def test_what_a_token_reads(path_of, tmp_path):
    tied = read(path_of("llama"))
    assert tied.is_tied and not tied.is_float32
    assert tied.weight_bytes_per_token == sum(w.n_bytes for w in tied.weights()) + tied.vector_bytes
    assert tied.kv_bytes_per_token(windowed=False) == LAYERS * 2 * 2 * KV_SIZE  # float16 keys and values
    assert tied.kv_bytes_per_token(windowed=True) == 0

    path = generated_model.write(tmp_path / "model.gguf", tied=False, **SHAPE | {"quant": "F32"})
    other = read(path)
    assert not other.is_tied and other.is_float32
    all_but_a_row = (other.vocab - 1) * DIM * 4
    assert other.weight_bytes_per_token == path_bytes(path) - all_but_a_row
    assert other.kv_bytes_per_token(windowed=False) == LAYERS * 4 * 2 * KV_SIZE


def test_a_token_uses_three_of_eight_experts(path_of):
    spec = read(path_of("qwen3moe"))
    all_of_them = sum(w.experts * w.rows * w.cols for w in spec.weights() if w.experts > 1)
    assert spec.idle_parameters == all_of_them * 5 // 8 > 0 == read(path_of("llama")).idle_parameters


def test_sizes_of_each_layer(path_of):
    sizes = {
        "llama__attention__head_count": np.array([4] * LAYERS),
        "llama__attention__head_count_kv": np.array([2] * LAYERS),
        "llama__feed_forward_length": np.array([96] * LAYERS),
    }
    assert read(path_of("llama"), **sizes) == read(path_of("llama"))
    width = {"qwen3moe__expert_feed_forward_length": np.array([64] * LAYERS)}
    assert read(path_of("qwen3moe"), **width) == read(path_of("qwen3moe"))
    used = {"qwen3moe__expert_used_count": np.array([2, 3, 1])}
    assert [experts.used for experts in read(path_of("qwen3moe"), **used).experts] == [2, 3, 1]


def test_biases_of_one_matrix_may_be_several(path_of):
    sizes = {"q": DIM, "k": KV_SIZE, "v": KV_SIZE}
    own = {f"blk.0.attn_{x}.bias": (size,) for x, size in sizes.items()}
    attend = read(path_of("qwen"), {"blk.0.attn_qkv.bias": None} | own).attention[0]
    assert attend.q.tensor == attend.v.tensor == "blk.0.attn_qkv.weight"
    found = {bias.tensor: (bias.size,) for bias in (attend.q_bias, attend.k_bias, attend.v_bias)}
    assert found == own


def test_layers_that_run_several_times(path_of):
    spec, once = read(path_of("nanbeige")), read(path_of("nanbeige"), nanbeige__num_loops=None)
    assert spec.sublayers[: 2 * LAYERS] == once.sublayers
    assert [bool(s.renewed) for s in spec.sublayers] == [i == 2 * LAYERS for i in range(4 * LAYERS)]
    assert len(spec.caching) == 2 * len(once.caching) and [*spec.weights()] == [*once.weights()]
    of_layers = sum(w.n_bytes for s in once.sublayers for w in s.operator.weights)
    assert spec.weight_bytes_per_token - once.weight_bytes_per_token == of_layers
    plain = read(path_of("nanbeige"), nanbeige__skip_loop_final_norm=True)
    assert plain.sublayers == 2 * once.sublayers
    with pytest.raises(ModelFileError, match="its layers run 1000 times"):
        read(path_of("nanbeige"), nanbeige__num_loops=1000)
    with pytest.raises(ModelFileError, match="its layers 2 times over several residual streams"):
        read(path_of("qwen4exp"), qwen4exp__num_loops=2)


def test_time_mixing_without_a_gate(path_of):
    spec, gated = read(path_of("arwkv7")), read(path_of("rwkv7"))
    first, second = (s.operator for s in spec.sublayers[:3:2])
    assert not (first.gate or first.norm or first.mix) and second.mix
    assert gated.sublayers[0].operator.gate and gated.sublayers[1].operator.words == "channel mixing"
    assert not spec.attention and first.state_bytes == 4 * (DIM * 64 + DIM)
    with pytest.raises(ModelFileError, match="has heads of 48 elements"):
        read(path_of("rwkv7"), rwkv7__wkv__head_size=48)


def test_time_mixing_without_its_other_parts(path_of):
    with pytest.raises(ModelFileError, match=r"has no blk\.1\.time_mix_ln\.bias"):
        read(path_of("rwkv7"), {"blk.1.time_mix_ln.bias": None})
    with pytest.raises(ModelFileError, match=r"blk\.1\.time_mix_ln\.bias"):
        read(path_of("rwkv7"), {"blk.1.time_mix_ln.weight": None})
    names = [name for name in GGUF(path_of("arwkv7")).tensors if name.startswith("blk.0.time_mix")]
    heads = {"blk.0.attn_q.weight": (DIM, DIM), "blk.0.attn_output.weight": (DIM, DIM)}
    heads |= {f"blk.0.attn_{x}.weight": (KV_SIZE, DIM) for x in "kv"}
    with pytest.raises(ModelFileError, match="layer 1 mixes tokens in time, and the first one does not"):
        counts = {"arwkv7__attention__head_count": 4, "arwkv7__attention__head_count_kv": 2}
        read(path_of("arwkv7"), heads | dict.fromkeys(names), **counts)


def test_limits_of_experts(path_of):
    """Those of Step 3.5 are of SiLU, of whose argument those of Maple are."""
    limited, other = read(path_of("step35")).experts
    assert other.activation == other.shared.activation == "silu"
    (most, limit), (shared_most, shared_limit) = limited.activation, limited.shared.activation
    assert (limit, shared_limit) == pytest.approx((0.5, 0.3))
    for x, silu in ((most, limit), (shared_most, shared_limit)):
        assert x / (1 + math.exp(-x)) == pytest.approx(silu)
    assert read(path_of("maple")).experts[0].activation == (0.5, 0.5)


def path_bytes(path):
    with GGUF(path) as file:
        return sum(info.n_bytes for info in file.tensors.values())


def test_windows(path_of):
    spec = read(path_of("gemma3"))
    assert [a.window for a in spec.attention] == [24, 24, 0] and spec.window == 24
    assert [a.rope for a in spec.attention] == [0, 0, 1], (
        "layers with a window have a rotary embedding of their own"
    )
    assert spec.kv_bytes_per_token(windowed=True) == 2 * spec.kv_bytes_per_token(windowed=False)

    layers = np.array([False, True, False])
    spec = read(path_of("gemma3"), gemma3__attention__sliding_window_pattern=layers)
    assert [a.window for a in spec.attention] == [0, 24, 0]
    assert read(path_of("gemma3"), gemma3__attention__sliding_window=0).window == 0
    phi3 = read(path_of("phi3"), phi3__attention__sliding_window=8)
    assert phi3.window == 0, "the key is in published files, and llama.cpp does not heed it"


def test_layers_without_rotation(path_of):
    """EXAONE 4's large models rotate in layers with a window alone, the small one in all."""
    windows = {
        "exaone4__attention__sliding_window": 8,
        "exaone4__attention__sliding_window_pattern": np.array([True, False, True]),
    }
    small, large = read(path_of("exaone4")), read(path_of("exaone4"), **windows)
    for spec, turned in ((small, [True] * 3), (large, [True, False, True])):
        assert [bool(spec.ropes[a.rope].frequencies) for a in spec.attention] == turned


def test_multipliers_that_older_files_do_not_say(path_of):
    keys = ("embedding_scale", "residual_scale", "logit_scale")
    spec = read(path_of("minicpm"), **{f"minicpm__{key}": None for key in keys})
    residual = 1.4 / LAYERS**0.5
    assert spec.embedding_scale == pytest.approx(12 / residual)
    assert spec.output_norm.factor == pytest.approx(DIM / 256)


def test_rows_of_models_that_see_are_in_the_other_order(path_of):
    sections = {"glm4__rope__dimension_sections": np.array([2, 3, 3, 0], np.int32)}
    blind, seeing = read(path_of("glm4")), read(path_of("glm4"), **sections)
    assert blind.attention[0].q.order and seeing.attention[0].q.order is None


def test_recurrent_layers(path_of):
    spec = read(path_of("qwen35"))
    delta, attend, last = (spec.sublayers[2 * i].operator for i in range(LAYERS))
    assert spec.recurrent == [delta, last] and spec.attention == [attend]
    assert delta.channels == 2 * 2 * 16 + 64
    assert spec.state_bytes == 2 * 4 * (4 * 16 * 16 + 3 * 128)
    assert (attend.q.every, attend.q.run, attend.q.first, attend.gate.first) == (32, 16, 0, 16)
    swapped = {"qwen35__attention__recurrent_layers": np.array([False, True, True])}
    with pytest.raises(ModelFileError, match=r"has blk\.0\.attn_qkv"):
        read(path_of("qwen35"), **swapped)
    with pytest.raises(ModelFileError, match="no layer has attention"):
        read(path_of("qwen35"), qwen35__block_count=1)
    with pytest.raises(ModelFileError, match="gated delta nets of a shape"):
        read(path_of("qwen35"), qwen35__ssm__group_count=3)


def test_layers_that_share_a_cache(path_of):
    spec = read(path_of("gemma4"))
    assert [(a.head_dim, a.window, a.cache_of) for a in spec.attention] == [
        (32, 24, None),
        (16, 0, None),
        (32, 24, 0),
    ]
    assert spec.attention[2].k is None and len(spec.caching) == 2
    assert [spec.kv_bytes_per_token(windowed) for windowed in (True, False)] == [256, 128]
    table = spec.layer_embeddings.table
    assert (table.rows, table.cols) == (spec.vocab, 3 * 32)
    unused = read(path_of("gemma4"), {"blk.2.attn_k.weight": (64, 64), "blk.2.attn_k_norm.weight": (32,)})
    assert unused == spec
    for layers in -1, 2, 3:
        with pytest.raises(ModelFileError, match="KV cache"):
            read(path_of("gemma4"), gemma4__attention__shared_kv_layers=layers)
    with pytest.raises(ModelFileError, match="no size of layer 2"):
        read(path_of("gemma4"), gemma4__feed_forward_length=np.array([96, 96]))
    with pytest.raises(ModelFileError, match="scaled layers without a norm"):
        read(path_of("gemma4"), {"blk.0.post_norm.weight": None})


def test_keys_as_values(path_of):
    spec = read(path_of("gemma4-moe"))
    assert [(a.kv_heads, a.v is None) for a in spec.attention] == [(2, False), (1, True), (2, False)]
    with pytest.raises(ModelFileError, match="keys as values"):
        read(path_of("gemma4-moe"), gemma4__rope__dimension_count=8)


def test_what_is_not_run(path_of):
    drafts = {"blk.2.nextn.eh_proj.weight": (DIM, 2 * DIM), "v.blk.0.attn_q.weight": (8, 8)}
    spec = read(path_of("qwen35"), drafts, qwen35__nextn_predict_layers=1)
    assert (spec.draft_layers, spec.encoders, len(spec.sublayers)) == (1, ("vision",), 4)
    assert spec.not_run == "a draft layer (multi-token prediction) and the vision encoder"
    assert not any(weight.tensor.startswith(("blk.2.", "v.")) for weight in spec.weights())
    assert read(path_of("qwen35")).not_run == ""


def test_matrices_for_pictures_are_left_out(path_of):
    with GGUF(path_of("llama")) as file:
        keys = {key.replace("llama.", "cogvlm."): value for key, value in file.metadata.items()}
        file.metadata = keys | {"general.architecture": "cogvlm"}
        file.tensors = {**file.tensors, "blk.0.vis_gate.weight": file.tensors["blk.0.ffn_gate.weight"]}
        assert "blk.0.vis_gate.weight" not in {weight.tensor for weight in read_spec(file).weights()}


def test_windows_of_olmo_3_turn_as_without_a_scaling(path_of):
    """Its files are of the architecture olmo2: set_swa_pattern(4) in llama.cpp, and a comment on yarn there."""
    yarn = {f"olmo2__{key.replace('.', '__')}": value for key, value in generated_families.YARN.items()}
    spec = read(path_of("olmo2"), olmo2__attention__sliding_window=16, **yarn)
    assert [a.window for a in spec.attention] == [16, 16, 16], "the fourth would have none"
    (rope,), (plain,) = spec.ropes, read(path_of("olmo2")).ropes
    assert (rope.frequencies, rope.magnitude) == (plain.frequencies, 1.0)
    assert read(path_of("olmo2"), **yarn).ropes[0].frequencies != plain.frequencies


def test_gemma_3_of_ollama(path_of):
    names = {"gemma3__rope__freq_base": None, "gemma3__rope__freq_base_swa": None}
    theirs = {"gemma3__rope__global__freq_base": 1e4, "gemma3__rope__local__freq_base": 500.0}
    assert read(path_of("gemma3"), **names, **theirs).ropes == read(path_of("gemma3")).ropes
    left_out = "rope__scaling__type", "rope__scaling__factor", "attention__layer_norm_rms_epsilon"
    unsaid = names | {f"gemma3__{key}": None for key in left_out}
    local, all_layers = read(path_of("gemma3"), **unsaid).ropes
    assert (local.frequencies[1], all_layers.frequencies[1]) == pytest.approx((1e4**-0.125, 1e6**-0.125))
    large = read(path_of("gemma3"), **unsaid, gemma3__context_length=1 << 17)
    assert large.eps == 1e-6 and large.ropes[0].frequencies == local.frequencies
    np.testing.assert_allclose(large.ropes[1].frequencies, np.array(all_layers.frequencies) / 8)


def test_a_file_of_ollama(path_of):
    tensors = {f"blk.{i}.ssm_dt.bias": None for i in (0, 2)} | {f"blk.{i}.ssm_dt": (4,) for i in (0, 2)}
    keys = {"qwen35__attention__head_count_kv": np.array([0, 2, 0]), "qwen35__ssm__v_head_reordered": True}
    spec = read(path_of("qwen35"), tensors | {"mtp.fc.weight": (DIM, 2 * DIM)}, **keys)
    assert [a.kv_heads for a in spec.attention] == [2] and spec.draft_layers == 1
    assert spec.recurrent[0].decay_bias.tensor == "blk.0.ssm_dt.bias"
    assert spec.recurrent[0].shares_in_turn
    other = read(path_of("qwen35"), tensors, **keys | {"qwen35__ssm__v_head_reordered": False})
    assert not other.recurrent[0].shares_in_turn
    with pytest.raises(ModelFileError):
        read(path_of("qwen35"), tensors, **keys | {"qwen35__attention__head_count_kv": np.array([2, 0])})


def test_an_older_file_of_qwen3_next(path_of):
    """One matrix has, of each key head, the rows of its query, its key, and its values and their gate."""
    layers = [i for i in range(LAYERS) if i != 1]
    tensors = {f"blk.{i}.{name}.weight": None for i in layers for name in ("attn_qkv", "attn_gate")}
    tensors |= {f"blk.{i}.ssm_in.weight": (2 * (2 + 2 * 2) * 16, DIM) for i in layers}
    net = read(path_of("qwen3next"), tensors).recurrent[0]
    assert [(w.first, w.every, w.run) for w in (*net.qkv, net.gate)] == [
        (0, 96, 16),
        (16, 96, 16),
        (32, 96, 32),
        (64, 96, 32),
    ]
    assert net.channels == sum(weight.rows for weight in net.qkv)


def test_experts_whose_gate_and_up_are_one_tensor(path_of):
    fused = {f"blk.{i}.ffn_{x}_exps.weight": None for i in range(LAYERS) for x in ("gate", "up")}
    fused |= {f"blk.{i}.ffn_gate_up_exps.weight": (8, 2 * 64, DIM) for i in range(LAYERS)}
    operator = read(path_of("qwen35moe"), fused).experts[0]
    assert (operator.gate.first, operator.up.first, operator.up.every, operator.up.run) == (0, 64, 128, 64)


def test_rotary_embeddings(path_of):
    plain, linear = (
        read(path_of("llama"), **keys).ropes[0]
        for keys in ({}, {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0})
    )
    np.testing.assert_allclose(plain.frequencies, 1e4 ** -(np.arange(8) / 8))
    np.testing.assert_allclose(linear.frequencies, np.array(plain.frequencies) / 4)
    for keys in (  # in llama.cpp, a factor without a type is linear, and that of old files has another name
        {"llama__rope__scaling__factor": 4.0},
        {"llama__rope__scale_linear": 4.0},
        {"llama__rope__scaling__type": "longrope", "llama__rope__scaling__factor": 4.0},
    ):
        assert read(path_of("llama"), **keys).ropes[0] == linear
    none = {"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 4.0}
    assert read(path_of("llama"), **none).ropes[0] == plain
    assert read(path_of("llama"), llama__rope__scaling__factor=0.0).ropes[0] == plain
    cos, sin = plain.tables(3, 100)
    assert cos.shape == sin.shape == (3, 8) and cos.dtype == np.float32
    np.testing.assert_allclose(np.arctan2(sin[2], cos[2]), 2 * np.array(plain.frequencies), rtol=1e-6)

    smollm3 = read(path_of("smollm3"), smollm3__block_count=LAYERS)
    assert [a.rope for a in smollm3.attention] == [0, 0, 0], "the fourth layer would not be rotated"
    (phi3,) = read(path_of("phi3")).ropes
    short, long, longer = (phi3.tables(9, context) for context in (64, 65, 1000))
    np.testing.assert_array_equal(long, longer)
    assert np.abs(np.array(short) - long).max() > 0.1
    np.testing.assert_allclose(np.hypot(*short), 1.2, rtol=1e-6)


def test_partly_rotated_heads_turn_no_more_than_that(path_of):
    spec = read(path_of("llama"), llama__rope__dimension_count=8)
    assert spec.attention[0].q.order == HeadOrder(16, 8, interleaved=True)
    cos, sin = spec.ropes[0].tables(5, 100)
    assert cos.shape == (5, 8) and (cos[:, 4:] == 1).all() and (sin[:, 4:] == 0).all()


def test_multipliers(path_of):
    """The stream is kept divided by what sublayers' results are multiplied by."""
    keys = generated_families.MULTIPLIERS
    spec, residual = read(path_of("granite")), keys["residual_scale"]
    assert spec.embedding_scale == pytest.approx(keys["embedding_scale"] / residual)
    assert spec.stream_eps == pytest.approx(spec.eps / residual**2)
    assert spec.output_norm.factor == pytest.approx(1 / keys["logit_scale"])
    assert spec.attention[0].scale == pytest.approx(keys["attention.scale"])
    assert read(path_of("gemma3")).embedding_scale == DIM**0.5


def test_contexts_end_where_tokens_would_be_chosen(path_of):
    spec = read(path_of("deepseek32"))
    assert (spec.trained_context, spec.reads_all_to) == (1024, 1024)
    with pytest.raises(UsageError, match="4,096") as error:
        chosen_context(spec, 4096, None, "cpu")
    assert "between 2 and 1,024 tokens, above which it reads chosen tokens alone" in error.value.hint
    shorter = read(path_of("minimax-m3"), **{"minimax-m3__context_length": 512})
    assert (shorter.trained_context, shorter.reads_all_to) == (512, 1024)


def test_frequencies_that_nobody_reads_are_left_out(path_of):
    assert read(path_of("llama"), {"blk.0.attn_rot_embd.weight": (8,)}) == read(path_of("llama"))


def test_how_experts_are_chosen(path_of):
    said, unsaid = read(path_of("bailingmoe2")).experts[0], read(path_of("glm4moe")).experts[0]
    assert (said.scoring, said.groups, said.used_groups, said.factor) == ("sigmoid", 4, 2, 1.5)
    assert (unsaid.scoring, unsaid.groups, unsaid.renormalised) == ("sigmoid", 1, True)
    softmax = read(path_of("dots1"), dots1__expert_gating_func=1, dots1__expert_weights_scale=None)
    assert not softmax.experts[0].renormalised and softmax.experts[0].is_plain
    assert isinstance(softmax.sublayers[1].operator, Dense), "a leading layer has no experts"


def test_latent_attention_of_both_layouts(path_of):
    """Newer files have the matrices of keys and of values apart, older ones together."""
    apart, together = (read(path_of(name)).attention[0] for name in ("deepseek2", "deepseek2-lite"))
    assert isinstance(apart, LatentAttention) and isinstance(together, LatentAttention)
    for part in (apart, together):
        assert (part.heads, part.kv_heads, part.head_dim) == (4, 1, 64 + 16)
        assert (part.latent, part.plain, part.rotated, part.values) == (64, 32, 16, 32)
    assert together.of_keys.transposed and together.of_keys.tensor == together.of_values.tensor
    assert apart.q_down and not together.q_down
    grown = 1 + 0.1 * math.log(4)
    assert apart.scale == pytest.approx(grown**2 * 48**-0.5)
    assert read(path_of("deepseek2")).ropes[0].magnitude == 1
    unsaid = read(path_of("deepseek2"), deepseek2__rope__scaling__yarn_log_multiplier=None)
    assert unsaid.ropes[0].magnitude == pytest.approx(grown)
    assert unsaid.attention[0].scale == pytest.approx(grown**2 * 48**-0.5)
    scoring = read(path_of("deepseek2"), deepseek2__expert_gating_func=None).experts[0].scoring
    assert scoring == "sigmoid" and read(path_of("deepseek2-lite")).experts[0].scoring == "softmax"
