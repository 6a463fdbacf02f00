"""tinygrad 0.14.0: programs made once are kept from one run to the next.

Making a kernel's source takes tinygrad seconds a model, in Python; its own cache on disk holds only what the
compiler makes of the source afterwards. With this fix whole programs are kept there (`diskcache_put`, in the
user's cache folder), under the key that tinygrad itself knows them by in memory, so that a model's second start
compiles nothing. Of a program's steps only what a launch needs is kept: names, sizes, parameters, binary.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import tinygrad.engine.realize as realize
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import diskcache_get, diskcache_put
from tinygrad.uop.ops import Ops, UOp

from engine.fixes import TINYGRAD, require_tinygrad

_TABLE = "orin_chat_programs"
_stock = realize.lower_and_compile
_applied = False


def apply() -> None:
    """Changes tinygrad in this process, once. Raises BackendError where another version is installed."""
    global _applied
    require_tinygrad("Programs kept on disk")
    if _applied:
        return
    _applied = True
    realize.lower_and_compile = _lower_and_compile


def _lower_and_compile(linear: UOp) -> UOp:
    missing = {}
    for call in linear.toposort():
        if call.op is Ops.CALL and (found := realize._get_call_to_compile(call)) is not None:
            key = realize.to_program_key(*found)
            if key in realize.to_program_cache or key in missing:
                continue
            if (program := diskcache_get(_TABLE, _name(key))) is not None:
                realize.to_program_cache[key] = program
            else:
                missing[key] = _name(key)
    result = _stock(linear)
    for key, name in missing.items():
        if (slim := _slim(realize.to_program_cache[key])) is not None:
            diskcache_put(_TABLE, name, slim)
    return result


def _name(key: tuple[Any, ...]) -> str:
    ast_key, renderer, target, *settings = key
    parts = (
        ast_key,
        renderer.__qualname__,
        [getattr(target, f.name) for f in fields(target)],
        settings,
        _version(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def _version() -> str:
    """What else decides about a program: tinygrad, and these changes to it."""
    digest = hashlib.sha256(TINYGRAD.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _slim(program: UOp) -> UOp | None:
    """A program without the graphs that it was made from; None where tinygrad is going to need these."""
    if program.arg.local_size is None:
        return None
    sink, linear, source, binary = program.src
    parameters = tuple(u for u in linear.src if u.op is Ops.PARAM and u.addrspace != AddrSpace.ALU)
    return program.replace(
        src=(sink.replace(src=()), linear.replace(src=parameters), source.replace(arg=""), binary)
    )
