"""The architecture: who imports whom, who may import what, and what starting costs."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import embedx
from embedx import cli
from embedx.configs import function_of
from embedx.errors import ConfigError

PACKAGE = Path(embedx.__file__).parent
SPELLINGS = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")


def imports(path: Path) -> list[str]:
    """Every imported module, lazy ones too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            module = node.module or ""
            is_ours = module == "embedx"
            found += [f"embedx.{alias.name}" for alias in node.names] if is_ours else [module]
    return found


MODULES = sorted(PACKAGE.glob("*.py"))


class Row(NamedTuple):
    """What ``docs/architecture.md`` says of a module."""

    does: str
    imports: set[str]
    owns: set[str]


def table() -> dict[str, Row]:
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^\| module \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    rows = {}
    for line in lines.splitlines():
        module, does, ours, owned = (cell.strip() for cell in line.strip("|").split("|"))
        found = ({name for name in cell.split() if name != "-"} for cell in (ours, owned))
        rows[module.strip("`")] = Row(does, *found)
    return rows


TABLE = table()
STAGES = {module for module, row in TABLE.items() if row.does.startswith("stage: ")}


def test_every_module_has_its_place() -> None:
    assert {path.stem for path in MODULES} == set(TABLE)
    assert {function_of(stage)[0] for stage in cli.STAGES} - {"stages"} <= STAGES < set(TABLE)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_imports_what_the_table_says(path: Path) -> None:
    names = [name.split(".") for name in imports(path)]
    ours = {
        parts[1] if parts[1] in TABLE else "__init__" for parts in names if parts[0] == "embedx"
    }
    assert ours == TABLE[path.stem].imports
    owned = set[str]().union(*(row.owns for row in TABLE.values()))
    assert {parts[0] for parts in names} & owned == TABLE[path.stem].owns


def test_imports_go_one_way_and_only_one_module_imports_stages() -> None:
    above: set[str] = set()
    for module, row in TABLE.items():
        assert row.imports <= above, f"{module} imports what is not above it"
        assert module == "stages" or not row.imports & STAGES, f"{module} imports a stage"
        above.add(module)


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


@pytest.mark.parametrize("name", embedx.__all__)
def test_every_public_function_refuses_wrong_arguments_in_one_line(name: str) -> None:
    function = getattr(embedx, name)
    first = next(iter(inspect.signature(function).parameters))
    calls: list[tuple[tuple[object, ...], dict[str, object], str]] = [
        ((), {}, rf".*\.{name}: missing a required argument: '{first}'"),
        ((), {first: object()}, rf"{first} must be .*, not an object|.*: missing a required .*"),
        ((object(),), {}, rf"{first} must be .*, not an object|.*: missing a required .*"),
        ((object(),), {first: 1}, rf"{name} was given {first} twice; give it once"),
        ((object(),) * 9, {}, rf"{name} takes {first}.* without a name, .* given 9 values so; .*"),
    ]
    for args, kwargs, message in calls:
        with pytest.raises(ConfigError) as caught:
            function(*args, **kwargs)
        assert re.fullmatch(message, str(caught.value)), caught.value


def test_a_misspelt_argument_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError) as caught:
        embedx.extract(None, None, layer="fc")
    assert str(caught.value).startswith("there is no key 'layer'; the nearest are layers, ")


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
        "import embedx.project, embedx.evaluate, embedx.export, embedx.view, embedx.search",
        "import embedx.compare",
        "import embedx.data",
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
