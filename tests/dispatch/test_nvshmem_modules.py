"""Modules that Triton loads are initialised for NVSHMEM, once: Triton's own chain of hooks, and its
loading of a compiled kernel, with a driver and an NVSHMEM that are made up.
"""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton", reason="Triton exists on Linux alone")

from triton import knobs  # noqa: E402
from triton.knobs import HookChain  # noqa: E402

from olmo_shard.dispatch.heap.nvshmem_modules import ModuleHook  # noqa: E402
from olmo_shard.errors import HeapError  # noqa: E402

STATE = ".visible .const .align 8 .b8 nvshmemi_device_state_d[776];"


class Nvshmem:
    """Counts what it is told, and gives ``status`` back."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.status = 0

    def init(self, module: int) -> int:
        self.calls.append(("init", module))
        return self.status

    def finalize(self, module: int) -> int:
        self.calls.append(("finalize", module))
        return self.status


@pytest.fixture
def nvshmem(monkeypatch):
    """With chains of hooks that are empty, and must be so again."""
    load, unload = HookChain(reversed=True), HookChain()
    monkeypatch.setattr(knobs.runtime, "kernel_load_end_hook", load)
    monkeypatch.setattr(knobs.runtime, "kernel_unload_hook", unload, raising=False)
    yield Nvshmem()
    assert load.calls == unload.calls == []


def group(folder: Path, name: str, text: str, suffix: str = ".ptx") -> dict[str, str]:
    """Files of a kernel in Triton's cache."""
    paths = {f"{name}{suffix}": text, f"{name}.json": STATE, f"{name}.source": STATE}
    for file, content in paths.items():
        (folder / file).write_text(content)
    return {file: str(folder / file) for file in paths}


def load(module: object, files: dict[str, str]) -> None:
    knobs.runtime.kernel_load_end_hook(module, 7, "kernel", files, "0123abc")


def unload(module: object, files: dict[str, str]) -> None:
    getattr(knobs.runtime, "kernel_unload_hook")(module, 7, "kernel", files, "0123abc")  # noqa: B009


def test_a_module_is_initialised_once_and_only_if_it_holds_the_state(nvshmem, tmp_path):
    hook = ModuleHook(nvshmem.init, nvshmem.finalize)
    with_state, without = group(tmp_path, "push", STATE), group(tmp_path, "add", "ret;")
    load(1, with_state)
    load(2, without)
    load(1, with_state)
    assert nvshmem.calls == [("init", 1)]
    load(3, with_state)
    assert nvshmem.calls == [("init", 1), ("init", 3)]
    hook.close()


def test_closing_finalises_what_is_loaded_and_hears_of_no_more(nvshmem, tmp_path):
    hook = ModuleHook(nvshmem.init, nvshmem.finalize)
    files = group(tmp_path, "push", STATE)
    load(1, files)
    load(3, files)
    hook.close()
    assert nvshmem.calls[2:] == [("finalize", 1), ("finalize", 3)]
    load(4, files)
    hook.close()
    assert len(nvshmem.calls) == 4


def test_a_handle_that_was_unloaded_is_a_new_module(nvshmem, tmp_path):
    hook = ModuleHook(nvshmem.init, nvshmem.finalize)
    files = group(tmp_path, "push", STATE)
    load(1, files)
    unload(1, files)
    unload(2, group(tmp_path, "add", "ret;"))
    load(1, files)
    assert nvshmem.calls == [("init", 1), ("finalize", 1), ("init", 1)]
    hook.close()
    assert nvshmem.calls[3:] == [("finalize", 1)]


def test_a_triton_that_does_not_unload_has_no_chain_for_it(nvshmem, tmp_path, monkeypatch):
    monkeypatch.setattr(knobs.runtime, "kernel_unload_hook", None, raising=False)
    hook = ModuleHook(nvshmem.init, nvshmem.finalize)
    load(1, group(tmp_path, "push", STATE))
    hook.close()
    assert nvshmem.calls == [("init", 1), ("finalize", 1)]
    # For the fixture's last look.
    monkeypatch.setattr(knobs.runtime, "kernel_unload_hook", HookChain(), raising=False)


def test_where_the_cache_keeps_no_text_the_binary_tells(nvshmem, tmp_path):
    hook = ModuleHook(nvshmem.init, nvshmem.finalize)
    load(1, group(tmp_path, "push", f"\x7fELF\0{STATE}", suffix=".cubin"))
    load(2, group(tmp_path, "add", "\x7fELF", suffix=".cubin"))
    assert nvshmem.calls == [("init", 1)]
    hook.close()


def test_a_refused_module_ends_the_launch_and_counts_as_not_initialised(nvshmem, tmp_path):
    hook = ModuleHook(nvshmem.init, nvshmem.finalize)
    files = group(tmp_path, "push", STATE)
    nvshmem.status = 7
    with pytest.raises(HeapError, match=r"the kernel kernel \(nvshmemx_cumodule_init gave 7\)"):
        load(1, files)
    nvshmem.status = 0
    load(1, files)
    assert nvshmem.calls == [("init", 1), ("init", 1)]
    hook.close()


def test_what_init_raises_ends_the_launch(nvshmem, tmp_path):
    def broken(module: int) -> int:
        raise RuntimeError(f"no symbol for {module}")

    hook = ModuleHook(broken, nvshmem.finalize)
    with pytest.raises(RuntimeError, match="no symbol for 1"):
        load(1, group(tmp_path, "push", STATE))
    with pytest.raises(FileNotFoundError):
        load(2, {"push.ptx": str(tmp_path / "gone.ptx")})
    hook.close()


def test_a_module_that_is_not_let_go_is_an_error(nvshmem, tmp_path):
    hook = ModuleHook(nvshmem.init, nvshmem.finalize)
    load(1, group(tmp_path, "push", STATE))
    nvshmem.status = 3
    with pytest.raises(HeapError, match=r"let the kernel kernel go .*cumodule_finalize gave 3"):
        hook.close()


class Driver:
    """What Triton asks of a driver to load a kernel."""

    def __init__(self) -> None:
        self.loaded = 0
        self.active = SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_target=lambda: SimpleNamespace(warp_size=32),
            launcher_cls=lambda source, metadata: "launch",
            utils=self,
        )

    def load_binary(self, *arguments: object) -> tuple[int, int, int, int, int]:
        self.loaded += 1
        return 100 + self.loaded, 7, 32, 0, 1024


def test_triton_itself_calls_the_hook_when_it_loads_a_kernel(nvshmem, tmp_path, monkeypatch):
    """Once for a kernel, however often it runs; again for one that comes from the cache."""
    compiler = importlib.import_module("triton.compiler.compiler")
    driver = Driver()
    monkeypatch.setattr(compiler, "driver", driver)
    monkeypatch.setattr(compiler, "max_shared_mem", lambda device: 10**6)
    monkeypatch.setattr(
        compiler,
        "make_backend",
        lambda target: SimpleNamespace(binary_ext="cubin", pack_metadata=lambda metadata: ()),
    )
    files = group(tmp_path, "push", STATE)
    metadata = {
        "target": {"backend": "cuda", "arch": 90, "warp_size": 32},
        "name": "push",
        "shared": 0,
        "num_warps": 4,
        "tmem_size": None,
    }
    Path(files["push.json"]).write_text(json.dumps(metadata))
    (tmp_path / "push.cubin").write_bytes(b"")
    files["push.cubin"] = str(tmp_path / "push.cubin")
    hook = ModuleHook(nvshmem.init, nvshmem.finalize)
    for _ in range(2):
        kernel = compiler.CompiledKernel(None, files, "0123abc")
        assert kernel.run == kernel.run == "launch"
        monkeypatch.setattr(kernel, "module", None)  # so that no later Triton unloads it
    assert nvshmem.calls == [("init", 101), ("init", 102)]
    hook.close()
