"""Report on the house: what each package costs to read, and the imports between them.

    python -m tests.harness.house [PACKAGE …] [--checkout PATH]

It prints numbers to judge a change by, and no test asserts one: a limit becomes a target. A package
that is named, such as `cluster/stores`, is drawn file by file.

A *stored* callable is a parameter of a constructor or a field, clocks apart: where a higher package
fills it, no reader of the lower one sees what runs. A *packed* assignment has several values on its
right side; it *swaps* where one of them is also assigned to. A *comment* has a line of its own.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import networkx

from tests.harness.layers import DEPTH, Module, import_graph, imports_upward, modules, part_of
from tests.harness.processes.python_program import ROOT

MEASURES = (
    *("files", "lines", "callables", "stored", "lambdas", "packed", "swaps", "isinstance"),
    "comments",
)
CLOCKS = {"Callable[[], float]", "Callable[[], int]"}
KINDS = {"Replica", "AveragedReplica", "GroupedReplica"}  # and what asks for one without a class
PARTS = tuple(DEPTH)  # from the top
Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="to draw file by file")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="another one, to compare")
    options = parser.parse_args()
    found = modules(options.checkout.resolve() / "paceline")
    print_measures(found)
    print_protocols(found)
    print_replica_kinds(found)
    print_imports(found)
    for package in options.packages:
        print_files(found, package.strip("/"))


def print_measures(found: Sequence[Module]) -> None:
    """Print the table of measures, a row a package."""
    rows: dict[str, Counter[str]] = {}
    for module in found:
        rows.setdefault(module.name.split("/")[0], Counter()).update(measure(module))
    names = dict.fromkeys(part.split("/")[0] for part in PARTS)
    print(f"{'package':14}" + "".join(f"{name:>11}" for name in MEASURES))
    rows["all"] = sum(rows.values(), Counter())
    for name in (*sorted(rows.keys() - names.keys() - {"all"}), *names, "all"):
        row = rows.get(name, Counter())
        print(f"{name:14}" + "".join(f"{row[measure]:11,}" for measure in MEASURES))


def measure(module: Module) -> Counter[str]:
    """Count what `MEASURES` names in a file."""
    counts = Counter(files=1, lines=len(module.source.splitlines()))
    for node in ast.walk(module.tree):
        match node:
            case ast.Lambda():
                counts["lambdas"] += 1
            case ast.Call(func=ast.Name(id="isinstance")):
                counts["isinstance"] += 1
            case ast.Assign(targets=[ast.Tuple() as targets, *_], value=ast.Tuple() as values):
                counts["packed"] += 1
                counts["swaps"] += swaps(targets, values)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                annotations = [argument.annotation for argument in arguments(node)]
                callables = [one for one in annotations if is_callable(one)]
                counts["callables"] += len(callables)
                if node.name == "__init__":
                    counts["stored"] += stored(callables)
            case ast.ClassDef():
                fields = [one.annotation for one in node.body if isinstance(one, ast.AnnAssign)]
                counts["stored"] += stored([one for one in fields if is_callable(one)])
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type == tokenize.COMMENT:
            counts["comments"] += not token.line[: token.start[1]].strip()
    return counts


def swaps(targets: ast.Tuple, values: ast.Tuple) -> bool:
    """Return whether a value is also assigned to."""
    return bool({ast.unparse(one) for one in targets.elts} & set(map(ast.unparse, values.elts)))


def arguments(function: Function) -> Iterator[ast.arg]:
    """Yield the parameters of a function."""
    own = function.args
    yield from (*own.posonlyargs, *own.args, *own.kwonlyargs)
    yield from (one for one in (own.vararg, own.kwarg) if one is not None)


def is_callable(annotation: ast.expr | None) -> bool:
    """Return whether an annotation names `Callable`."""
    nodes = ast.walk(annotation) if annotation is not None else ()
    return any(isinstance(node, ast.Name) and node.id == "Callable" for node in nodes)


def stored(annotations: Sequence[ast.expr | None]) -> int:
    """Count the callables that aren't clocks."""
    return sum(one is not None and ast.unparse(one) not in CLOCKS for one in annotations)


def print_protocols(found: Sequence[Module]) -> None:
    """Print each protocol's members, and the classes that have them all."""
    classes = {
        node.name: node
        for module in found
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    protocols = {name for name, node in classes.items() if "Protocol" in bases(node)}
    inherited = {name: all_members(name, classes) for name in classes}
    rows = []
    for name in protocols:
        others = inherited.keys() - protocols
        kinds = sorted(other for other in others if inherited[name] <= inherited[other])
        rows.append((len(inherited[name]), name, kinds))
    print(f"\n{'protocol':22}{'members':>9}  classes that have them all")
    for count, name, kinds in sorted(rows, key=lambda row: (-row[0], row[1])):
        telling = kinds if count > 2 else []  # many a class has one or two of these names
        print(f"{name:22}{count:9}  {len(telling) or ''} {' '.join(telling)}".rstrip())


def bases(node: ast.ClassDef) -> set[str]:
    """Name the classes that a class derives from itself."""
    return {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}


def all_members(name: str, classes: dict[str, ast.ClassDef]) -> frozenset[str]:
    """Name the methods and attributes of a class and its bases, without those for its own use."""
    node = classes[name]
    names = set()
    for one in ast.walk(node):
        match one:
            case ast.FunctionDef(name=method) if one in node.body:
                names.add(method)
            case ast.AnnAssign(target=ast.Name(id=field)) if one in node.body:
                names.add(field)
            case ast.Assign(targets=[ast.Name(id=field)]) if one in node.body:
                names.add(field)
            case ast.Attribute(value=ast.Name(id="self"), attr=field, ctx=ast.Store()):
                names.add(field)
    own = {one for one in names if not one.startswith("_") or one.endswith("__")} - {"__init__"}
    return frozenset(own).union(*(all_members(b, classes) for b in bases(node) if b in classes))


def print_replica_kinds(found: Sequence[Module]) -> None:
    """Print where code asks which kind of replica it has."""
    places = {
        module.name: sum(asks_for_kind(node) for node in ast.walk(module.tree)) for module in found
    }
    asking = {name: count for name, count in places.items() if count}
    where = ", ".join(f"{name} {count}" for name, count in asking.items())
    print(f"\nplaces that ask for a kind of replica: {sum(asking.values())} ({where})")


def asks_for_kind(node: ast.AST) -> bool:
    """Return whether a node is `isinstance` of a replica's class, or reads `.averaged`."""
    match node:
        case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
            named = {one.id for one in ast.walk(kinds) if isinstance(one, ast.Name)}
            return bool(named & KINDS)
        case ast.Attribute(attr="averaged", ctx=ast.Load()):
            return True
    return False


def print_imports(found: Sequence[Module]) -> None:
    """Draw what each part imports, from the top; then what goes up, and what goes in circles."""
    files = import_graph(found)
    parts: dict[str, set[str]] = {}
    for name, imported in files.items():
        own = part_of(name)
        others = {part_of(other) for other in imported} - {own, None}
        parts.setdefault(own or name, set()).update(one for one in others if one)
    print("\nimports, from the top")
    for part in PARTS:
        print(f"{part:26}→ {' '.join(one for one in PARTS if one in parts.get(part, ())) or '-'}")
    upward = [f"{m.name} → {part}" for m in found if m.part for part in imports_upward(m)]
    print(f"arrows up: {len(upward)}", *upward, sep="\n  ")
    print_circles("circles of packages", parts)
    print_circles("circles of files", files)


def print_files(found: Sequence[Module], package: str) -> None:
    """Draw the imports between a package's files."""
    files = import_graph([module for module in found if module.name.startswith(f"{package}/")])
    print(f"\nimports inside {package}")
    for name, imported in files.items():
        print(f"{name:40}→ {' '.join(sorted(imported)) or '-'}")
    print_circles(f"circles in {package}", files)


def print_circles(title: str, graph: dict[str, set[str]]) -> None:
    """Print the groups whose members all import each other, over others or not."""
    found = [sorted(group) for group in circles(graph)]
    print(f"{title}: {len(found)}", *(" ".join(group) for group in sorted(found)), sep="\n  ")


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of at least two that reach each other."""
    groups = networkx.strongly_connected_components(networkx.DiGraph(graph))
    return [group for group in groups if len(group) > 1]


if __name__ == "__main__":
    main()
