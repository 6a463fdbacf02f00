import subprocess

import pytest
from tinygrad.runtime.support.compiler_cpu import ClangCompiler

from engine.devices.clang import find_clang
from engine.errors import BackendError
from engine.fixes import compiler_output


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


def test_tinygrads_compiler_is_checked(monkeypatch):
    monkeypatch.setattr(ClangCompiler, "compile", ClangCompiler.compile)
    monkeypatch.setattr("engine.fixes._applied", set())
    compiler_output.apply()
    assert ClangCompiler.compile is compiler_output._compile
