"""The kernels are compiled for a GPU without one, where Triton is installed: its interpreter is more forgiving."""

import os
import subprocess
import sys

import pytest

from ict.nets.kernels import have_triton

COMPILE = """
import itertools
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ict.nets import fused, fused_norm
from ict.objectives import fused_coupling
from ict.training import fused as update

POINTERS = {
    "x": "half", "other": "half", "y": "half", "dy": "half", "extra": "half", "dx": "half", "g": "half",
    "keys": "*i32", "good": "*i32", "table": "*i64", "likeness": "*fp32", "found": "*i64",
}
count = 0


def kind_of(name, kernel, half):
    simple = kernel.__name__ in ("_join_kernel", "_join_back_kernel", "_fir_kernel", "_update_kernel", "_move_kernel")
    if name in POINTERS:
        return half if POINTERS[name] == "half" else POINTERS[name]
    if name in ("p", "eps", "gain", "inverse_scale", "beta1", "beta2", "lr") or name.startswith("rate"):
        return "fp32"
    if kernel.__name__ == "_update_kernel" and name in ("first", "second"):
        return "fp32"
    if name == "scale" and simple:
        return "fp32"
    if name in ("bias", "weight", "added", "rows", "grads", "lines", "sums", "sums2", "first", "second", "scale",
                "shift", "centre", "bend", "level"):
        return "*fp32"
    return "i32"


def compile_all(kernel, **choices):
    global count
    names = kernel.arg_names
    constants = [n for n in names if n in choices]
    for half in ("*fp16", "*fp32"):
        for values in itertools.product(*(choices[n] for n in constants)):
            chosen = dict(zip(constants, values))
            signature = {n: "constexpr" if n in chosen else kind_of(n, kernel, half) for n in names}
            source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in chosen.items()})
            triton.compile(source, target=GPUTarget("cuda", 90, 32))
            count += 1


yes_no = (False, True)
tiles = {"tall": (64,), "wide": (64,)}
compile_all(fused_norm._sum_kernel, span=(256,), **tiles)
compile_all(fused_norm._finish_kernel, adds=yes_no, wide=(8,))
compile_all(fused_norm._finish_back_kernel, wide=(8,))
compile_all(fused_norm._map_kernel, silu=yes_no, drops=yes_no, **tiles)
compile_all(fused_norm._sum_back_kernel, silu=yes_no, drops=yes_no, span=(256,), **tiles)
compile_all(fused_norm._map_back_kernel, silu=yes_no, drops=yes_no, more=yes_no, **tiles)
compile_all(fused._fir_kernel, taps=(2, 4), up=(1, 2), down=(1, 2), padding=(1, 2), **tiles)
compile_all(fused._join_kernel, span=(256,), **tiles)
compile_all(fused._join_back_kernel, scales=yes_no, **tiles)
compile_all(update._update_kernel, adapts=yes_no, averages=(1, 4), aligned=yes_no, wide=(4096,))
compile_all(update._move_kernel, averages=(1, 4), aligned=yes_no, wide=(4096,))
compile_all(fused_coupling._match_kernel, wide=(1, 64, 2048))
assert count > 50
"""


@pytest.mark.skipif(not have_triton(), reason="needs Triton")
def test_the_kernels_compile_for_a_gpu():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env=environment)
