"""Tells NVSHMEM of the kernels that Triton loads.

[Note: module state] A kernel that calls NVSHMEM carries a device state, the symbol
``nvshmemi_device_state_d``, which the host must fill once after the module is loaded
(``nvshmemx_cumodule_init``); without it the kernel's first call is an illegal access, or worse,
none that is seen. Triton loads a module at the first launch of a compiled kernel, whether it was
compiled or taken from the cache, and then calls the hooks in
``triton.knobs.runtime.kernel_load_end_hook``; from 3.8 on it also unloads modules, and calls
``kernel_unload_hook`` first. Before that a module stays loaded, so its handle is never used again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from olmo_shard.dispatch.heap.nvshmem_library import refusal

_STATE = b"nvshmemi_device_state_d"


class ModuleHook:
    """Initialises each module that holds NVSHMEM's state, until it is closed.

    :param init: takes the handle of a CUmodule, returns 0 if it could be initialised.
    :param finalize: the same for one that is unloaded, or still there when the hook is closed.
    """

    def __init__(self, init: Callable[[int], int], finalize: Callable[[int], int]) -> None:
        self._init, self._finalize = init, finalize
        self._modules: dict[int, str] = {}
        self._chains = _chains(self._loaded, self._unloaded)
        for chain, hook in self._chains:
            chain.add(hook)

    def close(self) -> None:
        """Before NVSHMEM is finalised.

        :raises HeapError: where NVSHMEM does not let a module go.
        """
        for chain, hook in self._chains:
            chain.remove(hook)
        for module in list(self._modules):
            self._let_go(module)

    def _loaded(
        self,
        module: object | None,
        function: object | None,
        name: str,
        metadata_group: dict[str, str],
        hash: str,
    ) -> None:
        """:raises HeapError: where NVSHMEM refuses the module; so it ends the launch."""
        assert isinstance(module, int), f"Triton's handle of {name} is {module!r}"
        if module in self._modules or not _holds_state(metadata_group):
            return
        if status := self._init(module):
            raise refusal(
                f"NVSHMEM refused the kernel {name} (nvshmemx_cumodule_init gave {status}): its "
                "bitcode may be of another version than the host library"
            )
        self._modules[module] = name

    def _unloaded(self, module: object | None, *_: object) -> None:
        if isinstance(module, int) and module in self._modules:
            self._let_go(module)

    def _let_go(self, module: int) -> None:
        name = self._modules.pop(module)
        if status := self._finalize(module):
            raise refusal(
                f"NVSHMEM did not let the kernel {name} go (nvshmemx_cumodule_finalize gave "
                f"{status})"
            )


def _chains(loaded: Callable[..., None], unloaded: Callable[..., None]) -> list[tuple[Any, Any]]:
    """Triton's chains of hooks, each with the hook for it."""
    from triton import knobs

    chains: list[tuple[Any, Any]] = [(knobs.runtime.kernel_load_end_hook, loaded)]
    unload_chain = getattr(knobs.runtime, "kernel_unload_hook", None)  # from Triton 3.8 on
    if unload_chain is not None:
        chains.append((unload_chain, unloaded))
    return chains


def _holds_state(metadata_group: dict[str, str]) -> bool:
    """
    :param metadata_group: paths of a kernel's files in Triton's cache, by name. The text is missing
        where Triton is told to keep binaries alone; the symbol is in the cubin, too.
    """
    paths = [path for name, path in metadata_group.items() if name.endswith((".ptx", ".cubin"))]
    return any(_STATE in Path(path).read_bytes() for path in paths)
