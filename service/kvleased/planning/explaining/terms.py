"""Own arithmetic that explains itself: each term has a value, its formula in names, and the same formula in numbers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

_SUM: Final = 1
_PRODUCT: Final = 2
_ATOM: Final = 3


@dataclass(frozen=True, slots=True)
class Term:
    """A number that knows where it comes from."""

    value: Fraction
    formula: str
    arithmetic: str
    binding: int = _ATOM
    """How tightly the outermost operator binds: if less than the operator around it, brackets are needed."""

    def __add__(self, other: "Term") -> "Term":
        """Return the sum."""
        return _joined(self, " + ", other, self.value + other.value, (_SUM, _SUM, _SUM))

    def __sub__(self, other: "Term") -> "Term":
        """Return the difference."""
        return _joined(self, " - ", other, self.value - other.value, (_SUM, _PRODUCT, _SUM))

    def __mul__(self, other: "Term") -> "Term":
        """Return the product."""
        return _joined(self, " * ", other, self.value * other.value, (_PRODUCT, _PRODUCT, _PRODUCT))

    def __truediv__(self, other: "Term") -> "Term":
        """Return the exact quotient."""
        return _joined(self, " / ", other, self.value / other.value, (_PRODUCT, _ATOM, _PRODUCT))

    def by(self, formula: str) -> "Term":
        """Return the same number with a formula of its own."""
        return replace(self, formula=formula)


def number(name: str, value: int) -> Term:
    """Return a number that has a name."""
    return Term(Fraction(value), name, str(value))


def literal(value: int) -> Term:
    """Return a number that is the same in every formula."""
    return number(str(value), value)


def floor(term: Term) -> Term:
    """Return the largest whole number that is not above the term."""
    return _called("floor", (term,), lambda value: Fraction(math.floor(value)))


def ceil(term: Term) -> Term:
    """Return the least whole number that is not below the term."""
    return _called("ceil", (term,), lambda value: Fraction(math.ceil(value)))


def round_up(term: Term, multiple: Term) -> Term:
    """Return the least multiple that is not below the term."""
    return _called(
        "round_up",
        (term, multiple),
        lambda value, step: Fraction(math.ceil(value / step)) * step,
    )


def least(terms: Sequence[Term]) -> Term:
    """Return the least of the terms; a single term is returned as it is."""
    return _called("min", _different(terms), min) if len(_different(terms)) > 1 else terms[0]


def most(terms: Sequence[Term]) -> Term:
    """Return the greatest of the terms; a single term is returned as it is."""
    return _called("max", _different(terms), max) if len(_different(terms)) > 1 else terms[0]


def common_divisor(terms: Sequence[Term]) -> Term:
    """Return the greatest number that divides all terms; a single term is returned as it is."""
    different = _different(terms)
    if len(different) == 1:
        return different[0]
    return _called("gcd", different, lambda *values: Fraction(math.gcd(*map(int, values))))


def common_multiple(terms: Sequence[Term]) -> Term:
    """Return the least number that all terms divide; a single term is returned as it is."""
    different = _different(terms)
    if len(different) == 1:
        return different[0]
    return _called("lcm", different, lambda *values: Fraction(math.lcm(*map(int, values))))


def total(terms: Sequence[Term]) -> Term:
    """Return the sum of some terms."""
    result = terms[0]
    for term in terms[1:]:
        result = result + term
    return result


def _called(name: str, terms: Sequence[Term], compute: Callable[..., Fraction]) -> Term:
    formulas = dict.fromkeys(term.formula for term in terms)
    return Term(
        compute(*(term.value for term in terms)),
        f"{name}({', '.join(formulas)})",
        f"{name}({', '.join(term.arithmetic for term in terms)})",
    )


def _joined(
    left: Term, operator: str, right: Term, value: Fraction, bindings: tuple[int, int, int]
) -> Term:
    on_left, on_right, own = bindings

    def text(of_left: str, of_right: str) -> str:
        first = of_left if left.binding >= on_left else f"({of_left})"
        second = of_right if right.binding >= on_right else f"({of_right})"
        return f"{first}{operator}{second}"

    return Term(
        value,
        text(left.formula, right.formula),
        text(left.arithmetic, right.arithmetic),
        own,
    )


def _different(terms: Sequence[Term]) -> tuple[Term, ...]:
    """Return the terms, without repeating equal ones."""
    return tuple({(term.formula, term.arithmetic): term for term in terms}.values())
