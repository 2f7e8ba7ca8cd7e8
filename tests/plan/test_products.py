"""Rules for products: which rule decides, files that older programs refuse, and printing."""

from __future__ import annotations

from pathlib import Path

import pytest

from paredown import Plan
from paredown.errors import PlanError
from paredown.plan import plan as plans
from paredown.plan.plan import combine_presets

NAMED = Plan.uniform(product="e4m3fn").set("product=layers.*", "int8").set("product=layers.0.fc", None)


def test_paths_beat_patterns_and_patterns_the_whole_in_any_order() -> None:
    other = Plan().set("product=layers.0.fc", None).set("product=layers.*", "int8").set("product", "e4m3fn")
    for plan in (NAMED, other):
        found = [plan.product_of(path) for path in ("head", "layers.1.fc", "layers.0.fc")]
        assert found == [("e4m3fn", False), ("int8", False), (None, True)]
    assert other == NAMED and not NAMED.diff(other) and hash(NAMED) == hash(other)
    assert NAMED.set("product=layers.0.*", "e4m3fn").product_of("layers.0.up") == ("e4m3fn", False)  # the later of two patterns


def test_a_plan_with_products_is_no_baseline() -> None:
    only = Plan.uniform(product="int8")
    assert not only.changes_nothing and not only.quantizes_nothing and only.multiplies and only.key != Plan().key
    assert not Plan().set("product", None).multiplies and only.without("product") == Plan()
    assert {Plan.preset(name).products for name in ("fp8", "int8_products", "auto_products")} == {
        (("product", element),) for element in ("e4m3fn", "int8", "auto")
    }
    assert combine_presets(("fp8", "half")).products == (("product", "e4m3fn"),)


def test_files_of_plans_with_products_are_refused_by_older_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = NAMED.set("activation", "int8/64@bf16")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan and plan.to_json()["version"] == 3
    assert Plan.preset("activations8").to_json()["version"] == 2 and "products" not in Plan.preset("activations8").to_json()
    monkeypatch.setattr(plans, "WITH_OFFLOAD", 2)  # the newest version that a program reads
    with pytest.raises(PlanError, match=r"version 3; this paredown reads 1 to 2. Update paredown"):
        Plan.load(tmp_path / "plan.json")


def test_every_way_to_print_a_plan_says_that_it_multiplies() -> None:
    assert "product=layers.*     int8" in repr(NAMED) and repr(NAMED).startswith("Plan(3 rules)")
    assert "products: 8-bit codes in e4m3fn, which changes forward" in NAMED.explain()
    assert "products of layer 'layers.0.fc': unmodified" in NAMED.explain() and "product=layers.0.fc" in NAMED._repr_html_()
    assert repr(NAMED.diff(NAMED.without("product=layers.*").set("product", "int8"))) == (
        "product: e4m3fn -> int8\nproduct=layers.*: int8 -> no rule"
    )


def test_wrong_rules_are_sentences() -> None:
    for key, element, words in (
        ("product", "int4/64@bf16", "not in 'int4/64@bf16'"),
        ("product=", "int8", "a pair of a key"),
        ("product=fc", "fp8", "e4m3fn, in int8, or in auto"),
    ):
        with pytest.raises(PlanError, match=words):
            Plan().set(key, element)
    with pytest.raises(PlanError, match="products round to nearest"):
        Plan().set("product", "int8", rounding="stochastic")
    with pytest.raises(PlanError, match="has two rules"):
        Plan(products=(("product", "int8"), ("product", None)))
    with pytest.raises(PlanError, match="no rule 'product=fc' to leave out"):
        NAMED.without("product=fc")
