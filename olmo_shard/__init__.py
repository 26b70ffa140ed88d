"""olmo_shard: pretrain mixture-of-experts language models on CPUs and GPUs.

Importing the package takes little time. It needs no GPU, no Triton and no network, and writes no
file.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("olmo-shard")
except PackageNotFoundError:  # run from a source tree that is not installed (PYTHONPATH=.)
    __version__ = "0+source"
