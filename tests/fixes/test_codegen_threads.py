"""Code is generated while another thread uses a device, as one that fills weights."""

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from tinygrad import Device, UOp, codegen
from tinygrad.uop.ops import KernelInfo

from engine.fixes import codegen_threads


class _GeneratedError(Exception):
    pass


def test_other_threads_use_devices_while_one_generates_code() -> None:
    codegen_threads.apply()
    renderer = Device["CPU"].renderer  # opening the device compiles kernels

    def generate(*arguments: object, **options: object) -> None:
        with pytest.raises(AssertionError, match="usage of device CPU disallowed"):
            Device["CPU"]
        with ThreadPoolExecutor(1) as other:
            assert other.submit(lambda: Device["CPU"]).result()
        raise _GeneratedError

    with mock.patch.object(codegen, "full_rewrite_to_sink", generate), pytest.raises(_GeneratedError):
        codegen.do_to_program(UOp.sink(arg=KernelInfo()), renderer)
    assert Device["CPU"] and not codegen_threads._generating
