"""Initialises NVSHMEM in the kernels that Triton loads.

[Note: module state] A kernel that calls NVSHMEM contains a device state, the symbol
``nvshmemi_device_state_d``. The host must fill it once after the module is loaded
(``nvshmemx_cumodule_init``). Otherwise the kernel's first call is an illegal access, which may go
unnoticed. Triton loads a module at the first launch of a kernel, whether it has compiled the kernel
or found it in its cache, and then calls the hooks in ``triton.knobs.runtime.kernel_load_end_hook``.
From 3.8 on Triton also unloads modules, and calls ``kernel_unload_hook`` first. Earlier versions
keep every module loaded, so the handle of a module is never used again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from olmo_shard.dispatch.heap.nvshmem_library import refusal

_STATE = b"nvshmemi_device_state_d"


class ModuleHook:
    """Initialises each loaded module that contains NVSHMEM's state, until the hook is closed.

    :param init: initialises a module, given the handle of its CUmodule; returns 0 on success.
    :param finalize: finalises a module that is unloaded, or that is still loaded when the hook is
        closed; returns 0 on success.
    """

    def __init__(self, init: Callable[[int], int], finalize: Callable[[int], int]) -> None:
        self._init, self._finalize = init, finalize
        self._modules: dict[int, str] = {}
        self._chains = _chains(self._loaded, self._unloaded)
        for chain, hook in self._chains:
            chain.add(hook)

    def close(self) -> None:
        """Finalise all modules. Must be called before NVSHMEM is finalised.

        :raises HeapError: if NVSHMEM cannot finalise a module.
        """
        for chain, hook in self._chains:
            chain.remove(hook)
        # Modules of earlier Tritons are never unloaded, so they are finalised here.
        for module in list(self._modules):
            self._finalize_module(module)

    def _loaded(
        self,
        module: object | None,
        function: object | None,
        name: str,
        metadata_group: dict[str, str],
        hash: str,
    ) -> None:
        """Initialise a module that Triton has loaded.

        :raises HeapError: if NVSHMEM refuses the module, which ends the kernel's launch.
        """
        assert isinstance(module, int), f"Triton's handle of {name} is {module!r}"
        # Triton may load a kernel twice; modules without the state know nothing of NVSHMEM.
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
            self._finalize_module(module)

    def _finalize_module(self, module: int) -> None:
        name = self._modules.pop(module)
        if status := self._finalize(module):
            raise refusal(
                f"NVSHMEM did not let the kernel {name} go (nvshmemx_cumodule_finalize gave "
                f"{status})"
            )


def _chains(loaded: Callable[..., None], unloaded: Callable[..., None]) -> list[tuple[Any, Any]]:
    """Triton's chains of hooks, each with the hook to add to it."""
    from triton import knobs

    chains: list[tuple[Any, Any]] = [(knobs.runtime.kernel_load_end_hook, loaded)]
    unload_chain = getattr(knobs.runtime, "kernel_unload_hook", None)  # from Triton 3.8 on
    if unload_chain is not None:
        chains.append((unload_chain, unloaded))
    return chains


def _holds_state(metadata_group: dict[str, str]) -> bool:
    """Whether a kernel contains NVSHMEM's device state.

    :param metadata_group: paths of a kernel's files in Triton's cache, by name. The PTX is missing
        if Triton is set to keep binaries only; the cubin contains the symbol as well.
    """
    paths = [path for name, path in metadata_group.items() if name.endswith((".ptx", ".cubin"))]
    return any(_STATE in Path(path).read_bytes() for path in paths)
