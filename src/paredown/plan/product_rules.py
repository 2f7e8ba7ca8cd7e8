"""Rules of a plan that let layers multiply 8-bit codes: `product`, `product=layers.*` and `product=layers.0.fc`, by path of a layer.

The elements are `e4m3fn` and `int8`, with a scale for each row (codec/products.py), and `auto`: e4m3fn where the device multiplies it, else
int8. None excludes layers. A path beats a pattern, a pattern beats the rule for all layers, and among equals the last rule wins.

>>> rules = checked_products((("product", "e4m3fn"), ("product=layers.0.*", None), ("product=layers.0.up", "int8")))
>>> [find_product(rules, path) for path in ("layers.1.up", "layers.0.down", "layers.0.up")]
[('e4m3fn', False), (None, False), ('int8', True)]
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from paredown.errors import PlanError
from paredown.plan.selectors import WILDCARDS
from paredown.serial import brief

PRODUCT = "product"
AUTO = "auto"
ELEMENTS = ("e4m3fn", "int8", AUTO)
Products = tuple[tuple[str, str | None], ...]


def is_product_key(key: Any) -> bool:
    """Return whether a rule's key chooses layers that multiply 8-bit codes: it is "product", or begins with "product=".

    >>> is_product_key("product=head"), is_product_key("product"), is_product_key("products.0:input")
    (True, True, False)
    """
    return isinstance(key, str) and key.partition("=")[0] == PRODUCT


def checked_products(rules: Any) -> Products:
    """Return a plan's rules for 8-bit products, the weakest first; raise PlanError for an invalid rule."""
    given: list[Any] = list(rules) if isinstance(rules, list | tuple) else [rules]
    for rule in given:
        if not (isinstance(rule, list | tuple) and len(rule) == 2 and is_product_key(rule[0]) and rule[0] != f"{PRODUCT}="):
            forms = "product, product=layers.*, product=layers.0.fc"
            raise PlanError(f"a rule for products is a pair of a key ({forms}) and an element, not {brief(rule)}.")
        if rule[1] is not None and rule[1] not in ELEMENTS:
            raise PlanError(
                f"rule {brief(rule[0])}: products run in e4m3fn, in int8, or in auto (what the device has), with a scale for each row, "
                f"not in {brief(rule[1])}. None excludes layers."
            )
    pairs: list[tuple[str, str | None]] = [(rule[0], rule[1]) for rule in given]
    keys = [key for key, _ in pairs]
    if repeated := next((key for key in keys if keys.count(key) > 1), None):
        raise PlanError(f"key {repeated!r} has two rules; a key has one. Leave one of them out.")
    return tuple(sorted(pairs, key=lambda pair: _rank(pair[0])))


def _rank(key: str) -> int:
    """Return the precedence of a rule for 8-bit products: 0 for all layers, 1 for a pattern, 2 for a path."""
    path = key.partition("=")[2]
    return 0 if not path else 1 if any(letter in WILDCARDS for letter in path) else 2


def find_product(rules: Products, path: str) -> tuple[str | None, bool]:
    """Return (8-bit element of the layer at `path` or None, whether a rule names exactly this layer)."""
    for key, element in reversed(rules):  # the strongest first
        text = key.partition("=")[2]
        if not text or text == path or (_rank(key) == 1 and fnmatchcase(path, text)):
            return element, text == path
    return None, False


def say_product(key: str, element: str | None) -> str:
    """Return a rule in words: "products of layers like 'layers.*': 8-bit codes in int8, which changes forward"."""
    path = key.partition("=")[2]
    where = "products" if not path else f"products of layers like {path!r}" if _rank(key) == 1 else f"products of layer {path!r}"
    which = "e4m3fn or int8, as the device has them" if element == AUTO else element
    return f"{where}: {f'8-bit codes in {which}, which changes forward' if element else 'unmodified'}"
