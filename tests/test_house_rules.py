"""The rules that an import contract cannot show."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("wire", "workers", "portal", "client", "allinone")
EDGES = ("portal/api", "portal/web", "portal/tasks.py", "portal/management")
ORM_WRITES = {
    "save",
    "create",
    "bulk_create",
    "bulk_update",
    "update_or_create",
    "get_or_create",
    "delete",
    "acreate",
    "asave",
}
STATE_DOOR = "portal/services/transitions.py"
MOST_LINES = 400


def sources(*places: str) -> list[Path]:
    found = [
        path for place in places for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
    ]
    return [path for path in found if "migrations" not in path.parts]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=name)
def test_no_file_is_longer_than_one_can_read(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", sources(*EDGES), ids=name)
def test_edges_do_not_write_rows(path: Path) -> None:
    """Pages, routes, tasks and commands call a service; `objects.create`, `.save()` and the like stand there."""
    writes = [
        f"line {call.lineno}: .{call.func.attr}()"
        for call in calls(path)
        if isinstance(call.func, ast.Attribute) and call.func.attr in ORM_WRITES and not _on_session(call.func)
    ]
    assert writes == []


@pytest.mark.parametrize("path", sources("portal"), ids=name)
def test_states_change_through_one_door(path: Path) -> None:
    if name(path) == STATE_DOOR:
        return
    assigned = [
        f"line {target.lineno}: {ast.unparse(target)}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and target.attr == "state" and not _on_self(target)
    ]
    updated = [
        f"line {call.lineno}: update(state=…)"
        for call in calls(path)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "update"
        and any(keyword.arg == "state" for keyword in call.keywords)
    ]
    assert assigned + updated == []


def test_portal_package_stays_empty() -> None:
    """Anything here would be imported with the pure scheduler."""
    assert (ROOT / "portal" / "__init__.py").read_text().strip() == ""


def test_nothing_is_pickled() -> None:
    for path in sources(*PACKAGES):
        imported = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert not imported & {"pickle", "marshal", "shelve"}, name(path)


def _on_session(attribute: ast.Attribute) -> bool:
    return ast.unparse(attribute.value) in {"request.session", "form"}


def _on_self(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id == "self"
