"""The environment variables that choose CPU kernels take effect.

``make test-slow`` runs this test once per set of kernels. Without it, a misspelt variable would
repeat the numeric tests with the default kernels.
"""

import os

from tests.support.cpu_kernels import VARIABLES, probed

ACTIVE = {
    "torch": {"default": "DEFAULT", "avx2": "AVX2"},
    # MKL takes AUTO, not AVX2, on processors of other makers than Intel; unset, it says OFF.
    "MKL": {"COMPATIBLE": "COMPATIBLE", "AVX2": "AVX2 or AUTO"},
    "oneDNN": {"SSE41": "Intel SSE4.1", "AVX2": "Intel AVX2"},
}
"""Library to (value of its variable to the kernels that the library then reports)."""


def test_each_variable_that_is_set_takes_effect() -> None:
    reported = probed()
    for library, variable in zip(ACTIVE, VARIABLES, strict=True):
        if variable in os.environ and reported[library] != "absent":
            active = ACTIVE[library][os.environ[variable]]
            assert reported[library] in active.split(" or "), (variable, reported)
