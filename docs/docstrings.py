"""What the docstrings say, in the form that mkdocstrings renders: an extension of griffe, which reads the sources.

The docstrings are written to be read in an editor. Here

- roles, ``:func:`plan```, become links to the name's page (to nothing that is private);
- literal blocks, ``::``, and interactive examples, ``>>>``, become code blocks;
- the comment behind a field, and its line under ``Attributes:``, become the field's docstring.

Nothing is imported: building the pages needs no torch.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from griffe import Attribute, Class, Docstring, Extension, Module, Object

ROLE = re.compile(r":(?:func|class|meth|mod|data|exc|attr):`[.~]?([\w.]+)`")
LITERAL = re.compile(r"::\n((?:\n|[ \t]+\S.*(?:\n|$))+)")
EXAMPLE = re.compile(r"^([ ]*)>>> .*\n?(?:^\1(?:>>>|\.\.\.|[^\s]).*\n?)*", re.MULTILINE)
ATTRIBUTES = re.compile(r"^Attributes:\n((?:[ ]+.*\n?|\n)+)", re.MULTILINE)
FIELD = re.compile(r"\n(\w+): ")


class Docstrings(Extension):
    """Rewrites each docstring of a package once all of it is read."""

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """Called by griffe."""
        for obj in _objects(pkg):
            if isinstance(obj, Attribute) and obj.docstring is None:
                _comment_to_docstring(obj)
            if isinstance(obj, Class):
                _attributes_to_members(obj)
        for obj in _objects(pkg):
            if obj.docstring is not None:
                obj.docstring.value = rewritten(obj.docstring.value, obj, pkg)


def _objects(obj: Object) -> Iterator[Object]:
    yield obj
    for member in obj.members.values():
        if not member.is_alias:
            yield from _objects(member)  # type: ignore[arg-type]


def rewritten(text: str, obj: Object, package: Module) -> str:
    """One docstring as Markdown with Google's sections."""
    text = ROLE.sub(lambda found: _link(found.group(1), obj, package), text)
    text = LITERAL.sub(lambda found: ":\n\n" + _fenced(found.group(1).strip("\n")), text)
    text = EXAMPLE.sub(lambda found: _fenced(found.group(0)), text)
    return re.sub(r"^([ ]*)Example:$", r"\1Examples:", text, flags=re.MULTILINE)


def _fenced(block: str) -> str:
    """A block of code of any indentation, fenced."""
    code = textwrap.dedent(block).rstrip()
    if code.startswith(">>>"):
        return textwrap.indent(f"```pycon\n{code}\n```", re.match("[ ]*", block).group(0)) + "\n"  # type: ignore[union-attr]
    return f"```{'python' if _is_python(code) else 'text'}\n{code}\n```\n"


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def _link(target: str, obj: Object, package: Module) -> str:
    path = _public_path(target, obj, package)
    return f"`{target}`" if path is None else f"[`{target.removeprefix('functional_moe.')}`][{path}]"


def _public_path(target: str, obj: Object, package: Module) -> str | None:
    """Where the documentation has ``target``, as ``obj`` sees it: in its scopes, then in the packages around."""
    if target.startswith(f"{package.path}."):
        return target
    first, _, rest = target.partition(".")
    scope: Any = obj
    while scope is not None:
        if first in scope.members:
            member = scope.members[first]
            path = member.target_path if member.is_alias else member.path
            return _exported(f"{path}.{rest}" if rest else path, package)
        scope = scope.parent
    return None


def _exported(path: str, package: Module) -> str | None:
    """``path`` without private modules, if the package around exports the name."""
    parts = path.split(".")
    while private := [index for index, part in enumerate(parts) if part.startswith("_")]:
        parts = parts[: private[0]] + parts[private[0] + 1 :]
        if private[0] >= len(parts):
            return None
    scope: Any = package
    for part in parts[1:]:
        if part not in scope.members:
            return None
        scope = scope.members[part]
        if scope.is_alias:
            scope = package.modules_collection[scope.target_path]
    return ".".join(parts)


def _comment_to_docstring(attribute: Attribute) -> None:
    """Takes ``name: type  # comment``, or ``#: comment`` on the line before."""
    if attribute.lineno is None or attribute.parent is None:
        return
    lines = attribute.lines_collection[attribute.filepath]  # type: ignore[index]
    line, before = lines[attribute.lineno - 1], lines[attribute.lineno - 2] if attribute.lineno > 1 else ""
    found = re.match(r"\s*#: (.*)", before) or re.search(r"  # (?!type: ignore)(.*)$", line)
    if found and attribute.lineno == attribute.endlineno:
        attribute.docstring = Docstring(found.group(1), parent=attribute)


def _attributes_to_members(cls: Class) -> None:
    """Takes the section ``Attributes`` apart, so that a field is described in one place."""
    found = ATTRIBUTES.search(cls.docstring.value) if cls.docstring else None
    if cls.docstring is None or found is None:
        return
    _, *fields = FIELD.split("\n" + textwrap.dedent(found.group(1)))
    described = dict(zip(fields[::2], fields[1::2], strict=True))
    if not all(name in cls.members and isinstance(cls.members[name], Attribute) for name in described):
        return
    for name, text in described.items():
        cls.members[name].docstring = Docstring(" ".join(text.split()), parent=cls.members[name])
    cls.docstring.value = ATTRIBUTES.sub("", cls.docstring.value).rstrip()
