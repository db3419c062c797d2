# SPDX-License-Identifier: Apache-2.0
"""Short names for recipes, with only those arguments that tell them apart."""

import ast
import re
from collections import Counter
from collections.abc import Sequence

_LONGEST_VALUE = 32
# The module of a class that another package defines, as in my_package.methods:Mine.
_MODULE = re.compile(r"(?<![\w.'\"])[^\W\d]\w*(?:\.[^\W\d]\w*)*:(?=[^\W\d])")


def name(recipe: str) -> str:
    """Return the recipe's outermost name with its base: `SlowMo(PushSum)` for `SlowMo(base=PushSum(), period=48)`.

    A text that is not a recipe, such as `ddp+bf16`, is its own name. Modules of classes are left out.

    Example:
        >>> name("SlowMo(base=PushSum(), period=48)")
        'SlowMo(PushSum)'
    """
    call = _call(recipe)
    if call is None:
        return recipe.strip()
    base = next((word.value for word in call.keywords if word.arg == "base"), None)
    inner = name(ast.unparse(base)) if base is not None else "Local"
    return family(recipe) if inner == "Local" else f"{family(recipe)}({inner})"


def family(recipe: str) -> str:
    """Return the recipe's outermost name alone: `SlowMo`."""
    call = _call(recipe)
    return call.func.id if call is not None and isinstance(call.func, ast.Name) else recipe.strip()


def labels(recipes: Sequence[str]) -> list[str]:
    """One label per recipe, all different: its name, with the arguments in which recipes of the same name differ.

    Example:
        >>> labels(["LocalSGD(period=4)", "LocalSGD(period=8)", "PushSum(staleness=1)"])
        ['LocalSGD(period=4)', 'LocalSGD(period=8)', 'PushSum']
    """
    names = [name(recipe) for recipe in recipes]
    seen = Counter[str]()
    result: list[str] = []
    for label in (_distinct(i, names, recipes) for i in range(len(recipes))):
        seen[label] += 1
        result.append(label if seen[label] == 1 else f"{label} #{seen[label]}")
    return result


def as_folder(label: str) -> str:
    """Return a label as the name of a folder: `SlowMo-PushSum` for `SlowMo(PushSum)`."""
    return re.sub(r"[^\w.-]+", "-", label).strip("-")


def shortened(words: str, most: int) -> str:
    """Return the words, their end replaced by `…` where they are longer than `most` characters."""
    return words if len(words) <= most else words[: most - 1] + "…"


def _distinct(index: int, names: Sequence[str], recipes: Sequence[str]) -> str:
    """Return a recipe's name, with the arguments that differ among the recipes of this name."""
    same_name = [_arguments(recipe) for other, recipe in zip(names, recipes, strict=True) if other == names[index]]
    own = _arguments(recipes[index])
    different = [key for key in own if len({other.get(key) for other in same_name}) > 1]
    if not different:
        return names[index]
    inside = ", ".join(f"{key}={shortened(own[key], _LONGEST_VALUE)}" for key in different)
    stem = names[index]
    return f"{stem[:-1]}, {inside})" if stem.endswith(")") else f"{stem}({inside})"


def _arguments(recipe: str) -> dict[str, str]:
    call = _call(recipe)
    if call is None:
        return {}
    return {word.arg or "**": ast.unparse(word.value) for word in call.keywords}


def _call(recipe: str) -> ast.Call | None:
    try:
        tree = ast.parse(_MODULE.sub("", recipe.strip()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) else None
