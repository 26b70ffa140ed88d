"""Direction of imports, cost of importing, content of the wheel."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = [
    "errors", "config", "data", "distributed", "kernels", "dispatch", "nn", "parallel", "optim",
    "train", "experiment", "check", "cli",
]  # fmt: skip


def sources() -> list[Path]:
    """All Python files of the package."""
    package = sorted((ROOT / "olmo_shard").rglob("*.py"))
    return [*package, *sorted((ROOT / "kernels").glob("*.py"))]


def part_of(path: Path) -> str:
    """The name in ``ORDER`` of the part to which a file belongs."""
    relative = path.relative_to(ROOT)
    return (
        relative.parts[0]
        if relative.parts[0] == "kernels"
        else relative.parts[1].removesuffix(".py")
    )


def imports_of(path: Path) -> list[str]:
    """All modules and names that a file imports, with their full names."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.append(node.module or "")
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    for name in imports_of(path):
        package, _, rest = name.partition(".")
        assert package != "kernels", "import olmo_shard.kernels"
        if package != "olmo_shard" or not rest or part in ("__init__", "__main__"):
            continue
        imported = rest.split(".")[0]
        if imported in ORDER:
            assert ORDER.index(imported) <= ORDER.index(part), f"{part} imports {imported}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "olmo_shard/nn").glob("*.py")), ids=lambda p: p.name
)
def test_a_model_never_sees_a_rank(path: Path) -> None:
    forbidden = ("olmo_shard.distributed", "olmo_shard.parallel", "torch.distributed")
    assert not [name for name in imports_of(path) if name.startswith(forbidden)]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "olmo_shard/config").glob("*.py")), ids=lambda p: p.name
)
def test_the_config_needs_no_torch(path: Path) -> None:
    assert not [name for name in imports_of(path) if name.split(".")[0] == "torch"]


def test_files_and_functions_stay_small() -> None:
    for path in sources():
        assert path.read_text().count("\n") <= (400 if part_of(path) == "kernels" else 300), path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                limit = 100 if node.name.endswith("_kernel") else 80  # Triton needs more lines
                assert (node.end_lineno or 0) - node.lineno < limit, f"{path}: {node.name}"


def test_no_script_and_no_test_changes_the_search_path() -> None:
    for path in [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        assert ".".join(["sys", "path"]) not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("module", ["olmo_shard", "olmo_shard.cli"])
def test_importing_is_light_and_writes_nothing(tmp_path: Path, module: str) -> None:
    code = (
        f"import sys, {module}; heavy = {{'torch', 'triton', 'wandb', 'numpy', 'matplotlib'}};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
    assert not list(tmp_path.iterdir())


def test_training_needs_no_triton(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import olmo_shard.experiment;"
        "print('matplotlib' in sys.modules, 'wandb' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "False"]


def test_the_wheel_contains_the_kernels_and_the_type_marker(tmp_path: Path) -> None:
    """The build runs without isolation, with the setuptools of the dev extra."""
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
    ]
    copy = tmp_path / "tree"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)
    subprocess.run([*command, str(copy)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tracked = [*(copy / "olmo_shard").rglob("*.py"), *(copy / "kernels").glob("*.py")]
    assert len(tracked) > 60
    assert "olmo_shard/py.typed" in names
    for path in tracked:
        relative = path.relative_to(copy)
        inside = f"olmo_shard/{relative}" if relative.parts[0] == "kernels" else str(relative)
        assert inside in names
    assert not [name for name in names if name.startswith(("kernels/", "scripts/", "tests/"))]
