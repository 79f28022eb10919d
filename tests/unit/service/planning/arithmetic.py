"""Evaluate the arithmetic of equations: whole numbers, four operators and six functions, and nothing else."""

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS: dict[str, Callable[..., Fraction | int]] = {
    "floor": math.floor,
    "ceil": math.ceil,
    "round_up": lambda number, multiple: math.ceil(number / multiple) * multiple,
    "min": min,
    "max": max,
    "gcd": lambda *numbers: math.gcd(*map(int, numbers)),
    "lcm": lambda *numbers: math.lcm(*map(int, numbers)),
}


def evaluated(arithmetic: str) -> Fraction:
    """Return the value of an equation's arithmetic."""
    return _value(ast.parse(arithmetic, mode="eval").body)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return Fraction(_FUNCTIONS[name](*map(_value, arguments)))
    raise AssertionError(ast.dump(node))
