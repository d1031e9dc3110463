"""The architecture: who imports whom, who may import what, and what starting costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import embedx

PACKAGE = Path(embedx.__file__).parent
PARTS = ["neighbors", "data", "checkpoints", "models", "hooks", "pooling"]
STAGES = ["extract", "project", "evaluate", "export", "view"]
# Module -> modules of embedx it may import.
MAY_IMPORT = {
    "errors": [],
    "progress": [],
    "checks": ["errors"],
    "configs": ["errors"],
    "store": ["errors"],
    **{part: ["checks", "errors", "store"] for part in PARTS},
    "models": ["checkpoints", "errors"],
    "rows": ["errors", "hooks", "pooling", "store"],
    **{
        stage: ["rows", "checks", "configs", "errors", "progress", "store", *PARTS]
        for stage in STAGES
    },
    "cli": ["__init__", "checks", "configs", "errors", "store", *PARTS, *STAGES],
    "__main__": ["cli"],
    "__init__": ["store", "hooks", *STAGES],
}
OWNERS = {
    "h5py": {"store"},
    "pydantic": {"checks"},
    "hydra": {"cli"},
    "omegaconf": {"cli"},
    "torchvision": {"models"},
    "timm": {"models"},
    "huggingface_hub": {"models"},
    "safetensors": {"checkpoints"},
    "umap": {"project"},
    "openTSNE": {"project"},
    "tensorboard": {"export"},
    "matplotlib": {"view"},
}
TORCH_AT_THE_TOP = {"checkpoints", "extract", "hooks", "models", "pooling", "rows"}
SPELLINGS = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")


def imports(path: Path) -> list[tuple[str, bool]]:
    """Every imported module, lazy ones too, and whether it is imported at the top."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.walk(node)
    }
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            module = node.module or ""
            if module == "embedx":
                found += [(f"embedx.{alias.name}", id(node) in top) for alias in node.names]
            else:
                found.append((module, id(node) in top))
    return found


MODULES = sorted(PACKAGE.glob("*.py"))


def test_every_module_has_its_place() -> None:
    assert {path.stem for path in MODULES} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_go_one_way_and_libraries_have_one_owner(path: Path) -> None:
    for name, at_top in imports(path):
        package, _, rest = name.partition(".")
        if package == "embedx":
            target = rest.split(".")[0]
            target = target if target in MAY_IMPORT else "__init__"
            assert target in MAY_IMPORT[path.stem], f"{path.stem} imports {target}"
        if package in OWNERS:
            assert path.stem in OWNERS[package], f"{path.stem} imports {package}"
        if package in ("torch", "torchvision") and at_top:
            assert path.stem in TORCH_AT_THE_TOP, f"{path.stem} imports {package} at the top"


def test_stages_do_not_import_each_other() -> None:
    for stage in STAGES:
        assert not set(MAY_IMPORT[stage]) & set(STAGES)


def test_only_hooks_registers_hooks() -> None:
    for path in MODULES:
        if path.stem != "hooks":
            text = path.read_text(encoding="utf-8")
            assert not any(spelling in text for spelling in SPELLINGS), path.name


def test_public_names_are_listed_sorted_and_there() -> None:
    assert embedx.__all__ == sorted(embedx.__all__)
    for name in embedx.__all__:
        value = getattr(embedx, name)
        assert callable(value), name
        assert value.__doc__
        assert value.__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = embedx.nothing


def test_a_stage_stays_a_function_after_its_module_was_imported() -> None:
    code = (
        "import embedx.extract, embedx.view, embedx\n"
        "from embedx.project import project\n"
        "assert embedx.project is project and callable(embedx.extract)\n"
        "from embedx import extract; assert extract.__name__ == 'extract' and callable(extract)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


LIGHT = """
import sys
{code}
heavy = {{"torch", "sklearn", "umap", "matplotlib", "pandas", "scipy"}} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    "code",
    [
        "import embedx; embedx.__all__",
        "from embedx.cli import main; main([])",
        "from embedx.cli import main; main(['--version'])",
        "from embedx.cli import main; main(['extrct'])",
        "from embedx.cli import main\ntry: main(['extract', '--help'])\nexcept SystemExit: pass",
        "from embedx.cli import main; main(['extract', 'model=resnet19'])",
        "import embedx; embedx.open",
        "import embedx.project, embedx.evaluate, embedx.export, embedx.view, embedx.data",
    ],
)
def test_what_needs_no_torch_does_not_import_it(code: str) -> None:
    subprocess.run([sys.executable, "-c", LIGHT.format(code=code)], check=True)


def test_help_imports_no_third_party_package_at_all() -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "from embedx.cli import main; main(['--help'])\n"
        "new = {n.split('.')[0] for n in set(sys.modules) - before} - {'embedx'}\n"
        "assert new <= set(sys.stdlib_module_names), new - set(sys.stdlib_module_names)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
