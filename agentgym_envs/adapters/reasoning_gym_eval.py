"""Some of Reasoning Gym's data sets evaluate an answer as Python. Here they evaluate numbers, lists and formulas, and nothing else."""

import ast
import functools
import sys
from typing import Any

# Their answers may be written as Python's lists. The others with `eval` give it what they made themselves.
_OF_LISTS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
_OF_TEXT = {"Symbol", "Function", "Integer", "Float", "Rational"}  # sympy's parser writes numbers and names as these
_FUNCTIONS = {"sqrt", "cbrt", "root", "real_root"}  # of sympy; its others are classes
_REFUSED = (ast.Attribute, ast.Lambda, ast.NamedExpr, ast.comprehension, ast.JoinedStr, ast.Starred, ast.Subscript)


@functools.cache
def evaluate_no_programs() -> None:
    """Change this process's Reasoning Gym and sympy for good: call it where answers are scored and nothing else is done."""
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym.") and name.rpartition(".")[2] in _OF_LISTS:
            vars(module)["eval"] = ast.literal_eval  # a module's own name comes before a built-in one

    from sympy.parsing import sympy_parser

    evaluate = sympy_parser.eval_expr

    def checked(code: str, local_dict: dict[str, Any], global_dict: dict[str, Any]) -> Any:
        _check(code, {**global_dict, **local_dict})
        return evaluate(code, local_dict, global_dict)

    sympy_parser.eval_expr = checked


def _check(code: str, names: dict[str, Any]) -> None:
    """ValueError if code that sympy's parser made of a text is more than a formula."""
    from sympy import Basic

    nodes = list(ast.walk(ast.parse(code.strip(), mode="eval")))
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    said = {id(given) for call in calls if call.func.id in _OF_TEXT for given in call.args}  # type: ignore[attr-defined]
    for node in nodes:
        if isinstance(node, ast.Name) and node.id not in _OF_TEXT | _FUNCTIONS:
            found = names.get(node.id)
            if not (isinstance(found, Basic) or (isinstance(found, type) and issubclass(found, Basic))):
                raise ValueError(f"{node.id} is no part of a formula")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in said:
            raise ValueError("a text is no part of a formula")
        elif isinstance(node, _REFUSED):
            raise ValueError(f"{type(node).__name__} is no part of a formula")
