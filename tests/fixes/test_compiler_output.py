import pickle
import subprocess
from types import SimpleNamespace

import pytest
from tinygrad import UOp
from tinygrad.helpers import getenv
from tinygrad.runtime.support import compiler_cpu
from tinygrad.runtime.support.compiler_cpu import ClangCompiler
from tinygrad.uop.ops import Ops

from engine.devices import kept_clang
from engine.devices.clang import find_clang
from engine.errors import BackendError, CompilerHangsError
from engine.fixes import compiler_output
from engine.kernels import compilation


@pytest.fixture
def compiled(monkeypatch):
    """What tinygrad keeps if the compiler has made this."""

    def compiled(made):
        monkeypatch.setattr(compiler_output, "_stock_compile", lambda compiler, source: made())
        return compiler_output._compile(None, "")

    return compiled


def test_what_is_no_whole_program_is_not_kept(compiled, tmp_path):
    command = [find_clang(), "-c", "-x", "c", "--target=x86_64-none-unknown-elf", "-", "-o", "-"]
    program = subprocess.check_output(command, input=b"int f(int x) { return x + 1; }")
    assert compiled(lambda: program) == program
    for part in (b"", program[:63], program[:-1], bytes(len(program))):
        with pytest.raises(BackendError, match="no whole program"):
            compiled(lambda part=part: part)
    for failing, why in ((["false"], "exit status 1"), ([str(tmp_path / "gone")], "No such file")):
        with pytest.raises(BackendError, match=why):
            compiled(lambda failing=failing: subprocess.check_output(failing))


def test_a_compiler_that_does_not_end_is_not_waited_for(applied, monkeypatch, tmp_path):
    """Also in a compiler process, whose error goes through pickle, and is not tried again by the engine."""
    compiler = tmp_path / "clang"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(kept_clang, "SECOND_S", 0.001)
    getenv.cache_clear()
    for what in kept_clang.keep, kept_clang.end:
        what()
        with pytest.raises(CompilerHangsError, match="clang has not ended within 60 s") as caught:
            ClangCompiler(["x86_64", "native"]).compile("int f;")
    task = SimpleNamespace(result=lambda: (_ for _ in ()).throw(pickle.loads(pickle.dumps(caught.value))))
    graph = UOp(Ops.SINK)
    monkeypatch.setitem(compilation._compiling, graph, compilation._Compiling(task, None))
    with pytest.raises(CompilerHangsError, match="names another one"):
        compilation._take(graph)
    assert graph not in compilation._failed


def test_tinygrads_compiler_is_checked(applied):
    assert ClangCompiler.compile is compiler_output._compile


@pytest.fixture
def applied(monkeypatch):
    monkeypatch.setattr(ClangCompiler, "compile", ClangCompiler.compile)
    monkeypatch.setattr(compiler_cpu, "subprocess", compiler_cpu.subprocess)
    monkeypatch.setattr("engine.fixes._applied", [])
    compiler_output.apply()
    yield
    getenv.cache_clear()
