"""olmo_shard: pretrain mixture-of-experts language models on CPUs and GPUs.

Importing the package is cheap: it needs no GPU, no Triton and no network, and writes nothing.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("olmo-shard")
except PackageNotFoundError:  # run from a source tree that is not installed (PYTHONPATH=.)
    __version__ = "0+source"
