"""The variables that choose CPU kernels take effect. Runs once per set of kernels.

Without this test, a misspelt variable would repeat the numeric part with the kernels of the first
time.
"""

import os

from tests.support.cpu_kernels import VARIABLES, probed

ACTIVE = {
    "torch": {"default": "DEFAULT", "avx2": "AVX2"},
    # MKL takes AUTO, not AVX2, on processors of other makers than Intel; unset, it says OFF.
    "MKL": {"COMPATIBLE": "COMPATIBLE", "AVX2": "AVX2 or AUTO"},
    "oneDNN": {"SSE41": "Intel SSE4.1", "AVX2": "Intel AVX2"},
}
"""By library and value of its variable, what the library reports."""


def test_each_variable_that_is_set_takes_effect() -> None:
    found = probed()
    for library, variable in zip(ACTIVE, VARIABLES, strict=True):
        if variable in os.environ and found[library] != "absent":
            active = ACTIVE[library][os.environ[variable]]
            assert found[library] in active.split(" or "), (variable, found)
