"""Boolean conditions over propositions, such as ``"coffee & !(mail | office)"``. They are parsed, never run as code."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass

_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<sign>[!&|()]))")
_WORDS = {"not": "!", "and": "&", "or": "|"}


@dataclass(frozen=True)
class Guard:
    """A parsed condition.

    Attributes:
        kind: ``"name"``, ``"constant"``, ``"!"``, ``"&"`` or ``"|"``.
        name: of the proposition.
        value: of the constant.
        parts: the operands.
    """

    kind: str
    name: str = ""
    value: bool = False
    parts: tuple[Guard, ...] = ()

    def holds(self, label: Set[str]) -> bool:
        """Whether it is true when exactly the propositions of ``label`` are."""
        match self.kind:
            case "name":
                return self.name in label
            case "constant":
                return self.value
            case "!":
                return not self.parts[0].holds(label)
            case "&":
                return all(part.holds(label) for part in self.parts)
            case _:
                return any(part.holds(label) for part in self.parts)

    @property
    def propositions(self) -> frozenset[str]:
        """The propositions that it mentions."""
        own = {self.name} if self.kind == "name" else set()
        return frozenset(own.union(*(part.propositions for part in self.parts)))


def parse_guard(text: str) -> Guard:
    """Parses a condition.

    Names of propositions are joined by ``!``/``not``, ``&``/``and``, ``|``/``or`` and brackets, which bind in this
    order; ``true`` and ``false`` are constants.

    Raises:
        ValueError: if the text is no such condition; shows where.
    """
    parser = _Parser(text)
    guard = parser.disjunction()
    if parser.next is not None:
        parser.fail(f"unexpected {parser.next!r}")
    return guard


class _Parser:
    """Recursive descent with one token of look-ahead in ``next``, ``None`` at the end."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.start = 0
        self.next: str | None = None
        self.advance()

    def advance(self) -> None:
        self.start = self.position
        if not self.text[self.position :].strip():
            self.next = None
            return
        found = _TOKEN.match(self.text, self.position)
        if found is None:
            self.fail(f"unexpected {self.text[self.position :].strip()[0]!r}")
        self.position = found.end()
        token = found["name"] or found["sign"]
        self.next = _WORDS.get(token, token)

    def fail(self, problem: str) -> None:
        raise ValueError(
            f"guard {self.text!r}: {problem} at position {self.start}; write names joined by !, &, | and brackets"
        )

    def disjunction(self) -> Guard:
        return self._joined("|", self.conjunction)

    def conjunction(self) -> Guard:
        return self._joined("&", self.negation)

    def _joined(self, sign: str, operand) -> Guard:
        parts = [operand()]
        while self.next == sign:
            self.advance()
            parts.append(operand())
        return parts[0] if len(parts) == 1 else Guard(sign, parts=tuple(parts))

    def negation(self) -> Guard:
        token = self.next
        if token is None:
            self.fail("a condition is missing")
        if token in ("&", "|", ")"):
            self.fail(f"a condition is missing before {token!r}")
        self.advance()
        if token == "!":
            return Guard("!", parts=(self.negation(),))
        if token == "(":
            guard = self.disjunction()
            if self.next != ")":
                self.fail("a closing bracket is missing")
            self.advance()
            return guard
        if token in ("true", "false"):
            return Guard("constant", value=token == "true")
        return Guard("name", name=token)
