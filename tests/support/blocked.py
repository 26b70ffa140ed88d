"""Python processes that cannot import some modules, as on a machine without them."""

import os
from pathlib import Path

BLOCK = """
import sys

for name in {names!r}:
    sys.modules[name] = None
"""


def without(folder: Path, *modules: str) -> dict[str, str]:
    """Environment whose Python processes, and their children, cannot import some modules.

    :param folder: folder for the file that Python runs at each start.
    :param modules: modules, or packages with all their submodules.
    """
    (folder / "sitecustomize.py").write_text(BLOCK.format(names=modules), encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path}
