"""Steps of small models in whose layers matrices of one product differ in type, as in files of mixed types."""

from tests.kernels.gpu.check_mixed import SMALL, hold

EXPERTS = {"blk.0.ffn_gate_exps": "Q4_0", "blk.*.ffn_up_exps": "Q5_1", "blk.1.ffn_gate_exps": "IQ4_NL"}


def check_types_that_differ_in_a_layer() -> None:
    """All matrices of a layer are of different types, other ones in each layer, and so are embedding and head."""
    types = {
        "token_embd": "Q5_0", "output": "F16",
        "blk.0.attn_q": "Q4_0", "blk.0.attn_k": "F16", "blk.0.attn_v": "Q8_0", "blk.0.attn_output": "BF16",
        "blk.0.ffn_gate": "IQ4_NL", "blk.0.ffn_up": "Q4_1", "blk.0.ffn_down": "F32",
        "blk.1.attn_[qv]": "Q5_1", "blk.1.ffn_down": "MXFP4",
    }  # fmt: skip
    hold(architecture="qwen2", types=types, tied=False, **SMALL | {"heads": 4, "kv_heads": 4})


def check_experts_whose_gate_and_up_differ_in_type() -> None:
    keys = {"attention.sliding_window": 4}
    hold(architecture="gpt-oss", types=EXPERTS, keys=keys, **SMALL | {"dim": 160})


def check_shared_experts_whose_gate_and_up_differ_in_type() -> None:
    """And delta nets of several types, and routers that are not float32."""
    types = EXPERTS | {
        "blk.*.ffn_gate_shexp": "Q4_1", "blk.0.ffn_down_shexp": "F16", "blk.0.ffn_gate_inp": "BF16",
        "blk.1.ffn_gate_inp": "Q8_0", "blk.*.attn_gate": "Q5_0", "blk.0.ssm_beta": "Q8_0", "blk.0.ssm_alpha": "F16",
    }  # fmt: skip
    hold(architecture="qwen35moe", types=types, seed=1, **SMALL | {"dim": 160, "heads": 5})
