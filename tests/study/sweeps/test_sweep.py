"""Sweeps: which pairs are drawn, with which probabilities, in which order; sweep files, and errors in them."""

from __future__ import annotations

import hashlib
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paredown.assignment.assign import PlanTemplate
from paredown.errors import SweepError
from paredown.plan.footprint import footprint
from paredown.plan.plan import Plan
from paredown.simulate.peppp import HIGH_FORMATS, LOW_FORMATS, peppp_plan
from paredown.study.sweeps.plan_labels import plan_label
from paredown.study.sweeps.sweep import SamplingMethod, Sweep, TrialSettings, TrialSpec, cheap_first_propensities, draw_pairs
from paredown.study.sweeps.sweep_file import load_sweep
from paredown.study.tasks.lookup import find_task
from paredown.study.tasks.task_trace import trace_task

PLANS = tuple(Plan.uniform(activation=f"int{bits}/{block}@bf16") for bits in (2, 4, 8) for block in (32, 64))
TASKS = tuple(f"task{i}" for i in range(20))


def nbytes(task: str, plan: Plan) -> int:
    """Bytes that differ from pair to pair."""
    return int(task[4:]) * 1000 + PLANS.index(plan) * 37 + 5


def pairs(sweep: Sweep) -> dict[tuple[str, int], float]:
    """(task, place of the plan) to propensity, of what is drawn."""
    return {(one.spec.task, PLANS.index(one.spec.plan)): one.propensity for one in sweep.draw(nbytes)}


def test_a_full_sweep_is_the_product_in_order() -> None:
    drawn = Sweep("s", TASKS[:2], PLANS, seeds=(3, 1)).draw()
    assert [(one.spec.task, one.spec.plan, one.spec.seed) for one in drawn] == list(product(TASKS[:2], PLANS, (3, 1)))
    assert {one.propensity for one in drawn} == {1.0}


@pytest.mark.parametrize(("share", "seed"), [(0.2, 0), (0.05, 7), (0.5, 1)])
def test_uniform_draws_are_those_of_the_papers_release(share: float, seed: int) -> None:
    """Its mask: numpy's legacy choice([True, False], p=[r, 1 - r]) over tasks x plans."""
    mask = np.random.RandomState(seed).choice([True, False], size=(len(TASKS), len(PLANS)), p=[share, 1 - share])
    expected = {(TASKS[i], j): share for i, j in np.argwhere(mask)}
    assert pairs(Sweep("s", TASKS, PLANS, method="uniform", share=share, draw_seed=seed)) == expected


def test_cheap_first_has_the_papers_odds_and_runs_the_cheapest_first() -> None:
    sweep = Sweep("s", TASKS, PLANS, method=SamplingMethod.CHEAP_FIRST, share=0.8)
    memory = np.array([nbytes(task, plan) for task in TASKS for plan in PLANS])
    rank = np.argsort(np.argsort(1 / memory))  # the double argsort of the release; no ties here
    odds = 0.8 * rank / (memory.size - 1)
    drawn = pairs(sweep)
    for place, (task, j) in enumerate(product(TASKS, range(len(PLANS)))):
        if (task, j) in drawn:
            assert drawn[task, j] == pytest.approx(odds[place], abs=1e-12)
    costs = [nbytes(one.spec.task, one.spec.plan) for one in sweep.draw(nbytes)]
    assert costs == sorted(costs) and 0.2 < len(costs) / memory.size < 0.6


@given(st.lists(st.integers(1, 50), min_size=2, max_size=40), st.floats(0.01, 1.0))
def test_odds_fall_with_bytes_from_share_to_none(sizes: list[int], share: float) -> None:
    odds = cheap_first_propensities(np.array(sizes, dtype=float), share)
    assert odds.max() == pytest.approx(share) and odds.min() == 0
    assert sorted(odds) == pytest.approx([share * k / (len(sizes) - 1) for k in range(len(sizes))])
    for (a, p), (b, q) in product(zip(sizes, odds, strict=True), repeat=2):
        assert not (a < b and p <= q)


def test_pairs_are_taken_as_often_as_the_odds_say() -> None:
    """4000 draws of 5 odds: a false alarm, beyond 5 standard deviations, once in 300,000 runs."""
    odds = np.array([0.0, 0.1, 0.4, 0.9, 1.0])
    taken = np.mean([draw_pairs(odds, SamplingMethod.UNIFORM, seed) for seed in range(4000)], axis=0)
    assert (np.abs(taken - odds) <= 5 * np.sqrt(odds * (1 - odds) / 4000)).all()


def test_a_pair_that_is_drawn_runs_with_every_seed() -> None:
    drawn = Sweep("s", TASKS, PLANS, seeds=(0, 1, 2), method="uniform", share=0.3).draw()
    per_pair: dict[tuple[str, int], list[int]] = {}
    for one in drawn:
        per_pair.setdefault((one.spec.task, PLANS.index(one.spec.plan)), []).append(one.spec.seed)
    assert set(map(tuple, per_pair.values())) == {(0, 1, 2)}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tasks": ()}, "has no tasks"),
        ({"plans": ()}, "has no plans"),
        ({"tasks": ("a", "a")}, "has one of its tasks twice: 'a'"),
        ({"plans": (Plan(), Plan(reason="again"))}, "has one of its plans twice"),
        ({"method": "cheapest"}, "method 'cheapest' is unknown. Allowed: full, uniform, cheap_first"),
        ({"share": 0.0, "method": "uniform"}, "share is above 0"),
        ({"share": 0.5}, "share 0.5 needs a method that samples"),
        ({"name": " "}, "a sweep needs a name"),
    ],
)
def test_wrong_sweeps_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(SweepError, match=said):
        Sweep(**{"name": "s", "tasks": ("a",), "plans": (Plan(),), **wrong})


def test_a_draw_of_nothing_and_a_draw_without_costs_say_so() -> None:
    with pytest.raises(SweepError, match=r"none of 1 pairs was drawn \(share 0.001, draw_seed 0\)"):
        Sweep("s", ("a",), (Plan(),), method="uniform", share=0.001).draw()
    with pytest.raises(SweepError, match="pass draw"):
        Sweep("s", ("a",), (Plan(),), method="cheap_first").draw()


def test_keys_tell_trials_apart_and_ignore_what_does_not_matter() -> None:
    base = TrialSpec("a", PLANS[0], 0)
    others = [
        TrialSpec("b", PLANS[0], 0),
        TrialSpec("a", PLANS[1], 0),
        TrialSpec("a", PLANS[0], 1),
        TrialSpec("a", PLANS[0], 0, TrialSettings("simulate")),
        TrialSpec("a", PLANS[0], 0, TrialSettings(device="cpu")),
        TrialSpec("a", PLANS[0].recomputing("layers.0"), 0),
        TrialSpec("a", PLANS[0].recomputing("layers.1"), 0),
    ]
    assert len({spec.key("s") for spec in [base, *others]} | {base.key("t")}) == 9
    same = [
        TrialSpec("a", Plan(PLANS[0].rules, "why", {"model": 1}), 0),
        TrialSpec("a", PLANS[0], 0, TrialSettings(timeout_seconds=9)),
    ]
    assert {spec.key("s") for spec in same} == {base.key("s")}
    text = b'["s", "a", [["activation", {"format": "int2/32@bf16", "overflow": null, "rounding": null}]], 0, "store", null]'
    assert base.key("s") == hashlib.sha256(text).hexdigest()[:32], "keys are in stores: they never change"


def test_plans_that_differ_in_what_is_computed_again_are_two() -> None:
    plans = Plan(), Plan((), recompute=("layers.0",))
    drawn = Sweep("s", ("a",), plans, seeds=(0,)).draw()
    assert [one.spec.plan for one in drawn] == list(plans)
    assert [plan_label(plan) for plan in plans] == ["baseline", "layers.0 checkpointed"]


TOML = """
tasks = ["digits", "mine.py:small"]
seeds = [0, 4]
method = "uniform"
share = 0.5
draw_seed = 3
mode = "simulate"
timeout_seconds = 60
store = "out/trials.db"
[[plans]]
[[plans]]
preset = "activations4"
[[plans]]
file = "plan.json"
[[plans]]
activation = ["int4/64@bf16", "int8/64@bf16"]
weight = "int8/64@e8m0"
rounding = "stochastic"
"""


def write(folder: Path, text: str) -> Path:
    """A sweep's file, and a plan beside it."""
    PLANS[0].save(folder / "plan.json")
    path = folder / "widths.toml"
    path.write_text(text)
    return path


def test_a_file_says_it_all(tmp_path: Path) -> None:
    found = load_sweep(write(tmp_path, TOML))
    crossed = [Plan.uniform(activation=f"int{b}/64@bf16", weight="int8/64@e8m0", rounding="stochastic") for b in (4, 8)]
    plans = (Plan(), Plan.preset("activations4"), PLANS[0], *crossed)
    settings = TrialSettings("simulate", None, 60)
    assert found.sweep == Sweep("widths", ("digits", "mine.py:small"), plans, (0, 4), SamplingMethod.UNIFORM, 0.5, 3, settings)
    assert found.store == str(tmp_path / "out" / "trials.db") and found.folder == tmp_path


def test_a_list_of_presets_or_files_is_a_plan_each(tmp_path: Path) -> None:
    text = TOML.replace('preset = "activations4"', 'preset = ["activations4", "lpmm"]').replace('"plan.json"', '["plan.json"]')
    plans = load_sweep(write(tmp_path, text)).sweep.plans
    assert plans[:4] == (Plan(), Plan.preset("activations4"), Plan.preset("lpmm"), PLANS[0])


def test_a_url_stays_what_it_is(tmp_path: Path) -> None:
    assert load_sweep(write(tmp_path, TOML.replace("out/trials.db", "postgresql://h/d"))).store == "postgresql://h/d"


LABELLED = """
tasks = ["a", "b"]
[[plans]]
[[plans]]
file = "plan.json"
label = "mine"
[[plans]]
preset = ["lpmm", "activations4"]
label = ["moments", "baseline 4"]
[[plans]]
activation = ["int4/64@bf16", "int3/64@bf16"]
weight = "int8/64@e8m0"
"""


def test_plans_have_the_labels_of_the_file_or_their_own_names(tmp_path: Path) -> None:
    sweep = load_sweep(write(tmp_path, LABELLED)).sweep
    crossed = [f"weight int8/64@e8m0, activation int{bits}/64@bf16" for bits in (4, 3)]
    labels = ["baseline", "mine", "moments", "baseline 4", *crossed]
    assert [(one.spec.task, one.label) for one in sweep.draw()] == list(product("ab", labels))
    plain = load_sweep(write(tmp_path, "".join(line for line in LABELLED.splitlines(True) if "label" not in line))).sweep
    keys = [one.spec.key("s") for one in sweep.draw()]
    assert keys == [one.spec.key("s") for one in plain.draw()], "a label is no part of a trial's identity"


def test_labels_of_the_user_are_kept_and_other_plans_get_numbers() -> None:
    stochastic = Plan.uniform(activation="int4/64@bf16", rounding="stochastic")
    plans = (Plan.preset("lpmm"), stochastic, Plan.uniform(activation="int4/64@bf16", rounding="toward_zero"))
    sweep = Sweep("s", ("a",), plans, labels={"activation int4/64@bf16": plans[2], "lpmm": stochastic})
    assert [one.label for one in sweep.draw()] == ["lpmm (2)", "lpmm", "activation int4/64@bf16"]


def test_plans_made_for_each_task_share_the_label_of_their_template() -> None:
    first, second, both = (
        Plan.uniform(activation=f"int{bits}/32@bf16").set("a:input", None).set("b:input", None) for bits in (2, 3, 4)
    )
    first, second, both = (
        Plan(plan.rules, made_for={"recipe": text})
        for plan, text in ((first, "assign 40% role"), (second, "assign 40% role"), (both, "assign 60% role; assign 60% size"))
    )
    pairs = (("x", first), ("y", second), ("y", both))
    sweep = Sweep("s", ("x", "y"), (Plan(),), pairs=pairs, labels=(("tight", PlanTemplate("40%")),))
    found = [(one.spec.task, one.label) for one in sweep.draw()]
    assert found == [("x", "baseline"), ("x", "tight"), ("y", "baseline"), ("y", "tight"), ("y", "assign 60% role and 1 more")]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('label = "mine"', 'label = ["mine", "yours"]'), "plan 2 of the file: label has 2 texts; it needs one label"),
        (('["moments", "baseline 4"]', '"moments"'), "plan 3 of the file: label has 1 text; it needs a list of 2 labels"),
        (('"mine"', '"moments"'), "label 'moments' is given to 2 plans; give each plan its own"),
        (('"mine"', "3"), "label 3 is not allowed; a label is a printable text of 1 to 200 characters"),
        (('"mine"', '" "'), "label ' ' is not allowed"),
        (('"mine"', '"a\\u001b[2J"'), "is not allowed"),
        (('"mine"', f'"{"x" * 201}"'), "is not allowed"),
    ],
)
def test_wrong_labels_are_sentences(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    assert change[0] in LABELLED
    with pytest.raises(SweepError, match=said):
        load_sweep(write(tmp_path, LABELLED.replace(*change)))


def test_a_label_of_a_plan_that_is_not_there_is_refused() -> None:
    with pytest.raises(SweepError, match="label 'mine' is for a plan that sweep 's' does not have"):
        Sweep("s", ("a",), (Plan(),), labels={"mine": PLANS[0]})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("seeds", "seed"), r"widths.toml: 'seed' is unknown. Did you mean 'seeds'\?"),
        (("[0, 4]", "3"), "seeds must be of type list, not int"),
        (("[0, 4]", '["a"]'), "seeds must be a list of int"),
        (("[0, 4]", "[true]"), "seeds must be a list of int"),
        (('"simulate"', '"fake"'), "mode 'fake' is unknown. Allowed: store, simulate"),
        (("= 60", "= -1"), "timeout_seconds is -1; it must be above 0"),
        (('preset = "activations4"', 'preset = "activation4"'), "plan 2 of the file: preset 'activation4' is unknown"),
        (('preset = "activations4"', "preset = [1]"), "plan 2 of the file: preset is a text or a list of texts"),
        (('preset = "activations4"', "preset = []"), "plan 2 of the file: preset is a text or a list of texts"),
        (('preset = "activations4"', "file = 3"), "plan 2 of the file: file is a text or a list of texts"),
        (('preset = "activations4"', 'preset = "activations4"\nweight = "int8"'), "plan 2 of the file: preset allows no other key"),
        (('"plan.json"', '"gone.json"'), "plan 3 of the file: .*No such file"),
        (('weight = "int8/64@e8m0"', 'weights = "int8/64@e8m0"'), "plan 4 of the file: .*'weights' is no role"),
        (("tasks = [", "tasks = "), "cannot be read"),
        (('tasks = ["digits", "mine.py:small"]', ""), "tasks is missing"),
    ],
)
def test_wrong_files_are_sentences(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    assert change[0] in TOML
    with pytest.raises(SweepError, match=said):
        load_sweep(write(tmp_path, TOML.replace(*change)))


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"there is no sweep .*none.toml"):
        load_sweep(tmp_path / "none.toml")


# --- plans of other kinds ---------------------------------------------------------------------------------------------


def test_a_file_may_have_plans_that_are_made_for_each_task(tmp_path: Path) -> None:
    tasks = ["digits#batch=32,model=mlp", "digits#batch=64,model=mlp"]
    (tmp_path / "s.toml").write_text(
        f"""tasks = {tasks}\ndevice = "cpu"\n[[plans]]\n[[plans]]\nassign = ["90%", "95%"]\nmethod = ["role", "size"]\n"""
    )
    sweep = load_sweep(tmp_path / "s.toml").sweep
    drawn = sweep.draw()
    assert [one.spec.task for one in drawn] == sorted((one.spec.task for one in drawn), key=tasks.index), "task by task"
    templates = {(task, text) for task, plan in sweep.pairs for text in plan.made_for["recipe"].split("; ")}
    assert templates == {(t, f"assign {b} {m}") for t in tasks for b in ("90%", "95%") for m in ("role", "size")}
    for task, plan in sweep.pairs:
        trace = trace_task(find_task(task), Plan.preset("lpmm"), "cpu")
        assert footprint(trace, plan).fits(plan.made_for["recipe"].split()[1])
    assert 2 + len(sweep.pairs) == len(drawn)


def test_a_file_may_have_peppps_configurations(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        f"""tasks = ["digits#model=sumlast18"]\nmode = "peppp"\n[[plans]]\npeppp_low = {list(LOW_FORMATS)}\n"""
        f"""peppp_high = {list(HIGH_FORMATS)}\n"""
    )
    plans = load_sweep(tmp_path / "s.toml").sweep.plans
    low = [(3, 1), (3, 2), (3, 3), (3, 4), (4, 1), (4, 2), (4, 3), (4, 4), (5, 1), (5, 2), (5, 3)]
    high = [(6, 7), (6, 9), (6, 11), (7, 7), (7, 9), (7, 11), (8, 7), (8, 9), (8, 11)]
    assert plans == tuple(peppp_plan(a, b) for a in low for b in high), "the released matrix has them in this order"


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ('assign = "40%"\nweight = "bf16"', "assign allows only method beside it; leave out weight"),
        ('assign = "40%"\nmethod = "magic"', "method 'magic' is unknown"),
        ('peppp_low = "e4m3"', "peppp_high is missing"),
        ('peppp_low = "e9m3"\npeppp_high = "e6m7"', "'e9m3' is no format of PEPPP"),
        ("peppp_low = 3\npeppp_high = 4", "3 is no format of PEPPP"),
    ],
)
def test_such_plans_go_wrong_with_a_sentence(table: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(f'tasks = ["digits#model=mlp"]\n[[plans]]\n[[plans]]\n{table}\n')
    with pytest.raises(SweepError) as raised:
        load_sweep(tmp_path / "s.toml")
    assert sentence in str(raised.value)
