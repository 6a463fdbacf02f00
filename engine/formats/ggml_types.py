"""The tensor types of ggml: how many elements a block has, and how many bytes.

From enum ggml_type in ggml/include/ggml.h and type_traits in ggml/src/ggml.c of llama.cpp. The ids 31 to 33, 37 and 38
are repacked forms that current files no longer have. 36 was one, too; files of BitNet's own program have it for their
ternary numbers (I2_S), 128 in 32 bytes, and one scale for all after those of a tensor.
"""

from typing import NamedTuple


class GGMLType(NamedTuple):
    name: str
    block: int
    block_bytes: int


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    31: GGMLType("Q4_0_4_4", 32, 18),
    32: GGMLType("Q4_0_4_8", 32, 18),
    33: GGMLType("Q4_0_8_8", 32, 18),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    36: GGMLType("I2_S", 256, 64),
    37: GGMLType("IQ4_NL_4_8", 32, 18),
    38: GGMLType("IQ4_NL_8_8", 32, 18),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
    42: GGMLType("Q2_0", 64, 18),
}
REMOVED = frozenset({31, 32, 33, 37, 38})
"""Types whose numbers forks of ggml have for types of their own."""
I2_S = 36
FORK = 97
"""The numbers of ik_llama.cpp's own types begin about here (enum ggml_type in its ggml.h)."""
# `engine.formats.widening` makes these of the types of files. A file cannot have them: their numbers are ours.
OF_MEMORY: dict[int, GGMLType] = {
    1001: GGMLType("wide_IQ1", 256, 146),
    1002: GGMLType("wide_IQ2", 256, 146),
    1003: GGMLType("wide_IQ3_XXS", 256, 138),
    1004: GGMLType("wide_IQ3_S", 256, 138),
    1005: GGMLType("wide_NVFP4", 64, 38),
}
TYPES = GGML_TYPES | OF_MEMORY
"""The types that a matrix can have once it is read."""
