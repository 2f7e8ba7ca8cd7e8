"""Plans as JSON: round trip, layout of the file, and errors of wrong files."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from paredown.errors import PlanError
from paredown.plan.plan import Plan
from tests.plan.plans import plans
from tests.support.strategies import examples


@given(plan=plans())
@examples(200)
def test_plan_equals_its_json(plan: Plan) -> None:
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan and hash(again) == hash(plan)
    assert [(key, str(rule.format)) for key, rule in again.rules] == [(key, str(rule.format)) for key, rule in plan.rules]


@given(plan=plans())
@examples(100)
def test_plan_equals_its_file_and_equal_plans_are_equal_files(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    plan.save(folder / "one.json")
    again = Plan.load(str(folder / "one.json"))
    again.save(folder / "two.json")
    assert again == plan
    assert (folder / "one.json").read_bytes() == (folder / "two.json").read_bytes()
    assert json.loads((folder / "one.json").read_text(encoding="utf-8")) == plan.to_json()


def test_layout_of_the_file(tmp_path: Path) -> None:
    plan = Plan.uniform(activation="int4/64@bf16").set("a.*", None)
    replace(plan, reason="why", made_for={"model": "net", "batch": 8}).save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text() == (
        "{\n"
        '  "version": 2,\n'
        '  "reason": "why",\n'
        '  "made_for": {"batch": 8, "model": "net"},\n'
        '  "recompute": [],\n'
        '  "rules": [\n'
        '    ["activation", {"format": "int4/64@bf16", "rounding": null, "overflow": null}],\n'
        '    ["a.*", {"format": null, "rounding": null, "overflow": null}]\n'
        "  ]\n"
        "}\n"
    )


# text of a file -> what the message has to say
WRONG_FILES = {
    "": "not JSON",
    "\x00\xff": "not JSON",
    "[" * 100_000: "not JSON",
    "[]": "an object with rules, version; this is []",
    "{}": "an object with rules, version",
    '{"version": 1}': "an object with rules, version",
    '{"version": 6, "slots": []}': "of version 6; this paredown reads 1 to 5. Update paredown",
    '{"version": "1", "rules": []}': "of version '1'; this paredown reads 1 to 5",
    '{"version": true, "rules": []}': "of version True; this",
    '{"version": 0, "rules": []}': "of version 0; this",
    '{"version": 1, "rules": [], "rule": 1}': "field 'rule' is unknown in a plan of version 5. Allowed: version, reason",
    '{"version": 1, "rules": {}}': "list of [key, {format, rounding, overflow}]",
    '{"version": 1, "rules": [["activation"]]}': "list of [key, {format, rounding, overflow}]",
    '{"version": 1, "rules": [["activation", "int4"]]}': "rule 'activation': expected format",
    '{"version": 1, "rules": [["activation", {"rounding": null}]]}': "rule 'activation': expected format",
    '{"version": 1, "rules": [["activation", {"format": null, "fmt": 1}]]}': "rule 'activation': expected format",
    '{"version": 1, "rules": [["activation", {"format": "int99"}]]}': "rule 'activation': format 'int99'",
    '{"version": 1, "rules": [["activation", {"format": 4}]]}': "rule 'activation': a format is text",
    '{"version": 1, "rules": [["activation", {"format": "int4", "rounding": "up"}]]}': "rounding 'up' is unknown",
    '{"version": 1, "rules": [[3, {"format": "int4"}]]}': "key 3 is not valid",
    '{"version": 1, "rules": [["buffer", {"format": "int4"}]]}': "have no format",
    '{"version": 1, "rules": [["a.b", {"format": null}], ["a.b", {"format": null}]]}': "key 'a.b' has two rules",
    '{"version": 1, "rules": [], "reason": null}': "reason of a plan is text",
    '{"version": 1, "rules": [], "made_for": 3}': "made_for is a dict",
    '{"version": 1, "rules": [], "made_for": {"a": NaN}}': "made_for must be JSON",
}


@pytest.mark.parametrize(("text", "said"), WRONG_FILES.items(), ids=range(len(WRONG_FILES)))
def test_wrong_files_raise_an_error_with_their_path(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value) and said in str(caught.value)


def test_rounding_and_overflow_may_be_left_out_of_a_file() -> None:
    assert Plan.from_json({"version": 1, "rules": [["activation", {"format": "int4"}]]}) == Plan.uniform(activation="int4")


def test_tiles_have_a_version_that_older_programs_refuse(tmp_path: Path) -> None:
    plan = Plan.uniform(frozen="nf4/64@bf16").recomputing("layers.*").tiling("layers.*", "*.mlp", length=2048)
    plan = plan.tiling("*.mlp", length=512)  # the last one counts
    assert plan.tiles == (("layers.*", 2048), ("*.mlp", 512)) and plan.to_json()["version"] == 4
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan != replace(plan, tiles=()) and pickle.loads(pickle.dumps(plan)) == plan
    assert replace(plan, tiles=()).to_json()["version"] == 2
    assert str(plan.diff(replace(plan, tiles=()))[0]) == "module layers.*: in tiles of 2048 tokens -> no rule"
    assert (
        "in tiles of 512 tokens: *.mlp" in plan.explain() and not plan.changes_nothing and Plan(tiles=plan.tiles).quantizes_nothing
    )


@pytest.mark.parametrize("tiles", [["layers.*"], [["layers.*"]], [["layers.*", 0]], [["a", 2], ["a", 3]], [["a:input", 2]], 3])
def test_wrong_tiles(tiles: Any) -> None:
    with pytest.raises(PlanError, match=r"a number of tokens above 0|names a module twice"):
        Plan.from_json({"version": 4, "rules": [], "tiles": tiles})
