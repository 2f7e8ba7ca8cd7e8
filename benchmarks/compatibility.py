"""The page docs/compatibility.md: what works, from tests and from results of the zoo.

    python benchmarks/compatibility.py --run      # run the tests of ROWS and small networks of the zoo; results/compatibility.json
    python benchmarks/compatibility.py --new      # run only tests of rows that have no outcome yet
    python benchmarks/compatibility.py --write    # write the page from results/*.json and the table of operations

A row names the test that shows it; the page has the outcome of that test when it last ran. tests/test_compatibility.py compares.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from loops import PACKAGES
from measure import machine
from tables import RESULTS, compiled_networks, markdown, relative

ROOT = Path(__file__).resolve().parent.parent
FILE = RESULTS / "compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"
WORKS, WITH_ROW, REFUSED = "works", "works, with a row in `changes`", "refused, with a sentence"
FLOOR = "2.11"  # the oldest torch that pyproject.toml allows


class Row(NamedTuple):
    """Something that a training uses, whether it works, and the test that shows it."""

    what: str
    state: str
    test: str  # file::function below tests/


ROWS: dict[str, tuple[Row, ...]] = {
    "Training loops": (
        Row("a loop of your own", WORKS, "session/test_loops.py::test_loops"),
        Row("autocast in bf16 and fp16, `GradScaler`", WORKS, "session/test_autocast.py::test_autocast_and_a_gradient_scaler"),
        Row("gradient accumulation, microbatches", WORKS,
            "optim/test_optimizers.py::test_microbatches_are_averaged_and_the_last_one_updates"),
        Row("second derivatives, gradient penalties", WORKS, "session/test_weights.py::test_second_derivatives"),
        Row("`state_dict`, loading and resuming", WORKS, "session/test_session.py::test_resuming_goes_on_with_the_same_bits"),
        Row("shared modules, tied weights", WORKS, "session/test_loops.py::test_shared_modules"),
        Row("threads inside of the model", WORKS, "session/test_threads.py::test_an_exact_plan_changes_no_bit"),
        Row("a model that is called part by part", WORKS,
            "session/test_entrances.py::test_calls_from_outside_save_and_compute_what_a_forward_does"),
        Row("activations that the caller holds until backward", WITH_ROW, "session/test_traps.py::test_what_the_caller_holds_is_a_row"),
        Row("tensors with fewer than 4096 values", WITH_ROW, "session/test_traps.py::test_small_tensors_are_a_row"),
        Row("a step that calls no module of the model", WITH_ROW,
            "session/test_entrances.py::test_a_step_that_calls_no_module_is_told_in_changes_the_summary_and_one_warning"),
        Row("`torch.func` on a model with a session", REFUSED, "session/test_compile.py::test_torch_func_is_refused_in_a_sentence"),
        Row("TorchScript", REFUSED, "session/test_entrances.py::test_scripted_models_are_refused_and_scripted_parts_named"),
        Row("sparse and complex gradients", REFUSED, "optim/test_gradients.py::test_sparse_complex_and_misfit_gradients_are_refused"),
        Row("models in float64 with packed optimizers", REFUSED, "optim/test_loops.py::test_a_model_in_float64_is_refused_in_a_sentence"),
    ),
    "Compilation, checkpointing, CUDA graphs": (
        Row("`session.compile()`", WORKS, "session/test_compiled.py::test_stored_bytes_are_those_of_formats_and_masks"),
        Row("the same with graph breaks, dynamic batches, compiled layers", WORKS,
            "session/test_compiled.py::test_graph_breaks_shapes_and_compiled_layers"),
        Row("attention of dynamic sizes, compiled", WITH_ROW, "session/test_compiled.py::test_attention_of_dynamic_sizes_stays_unmodified"),
        Row("packed weights in compiled modules", WITH_ROW, "session/test_compiled.py::test_modules_with_packed_weights_are_listed"),
        Row("`torch.compile(model)` of a model with a session", WITH_ROW, "session/test_compile.py::test_a_compiled_model"),
        Row("other backends than Inductor", REFUSED, "session/test_compiled.py::test_refusals"),
        Row("`torch.utils.checkpoint`, both modes", WORKS, "session/test_weights.py::test_checkpointing"),
        Row("packed activations in host memory, also under DDP and FSDP2", WORKS,
            "session/test_offload.py::test_several_processes_offload_their_own_activations"),
        Row("packed activations in host memory, compiled", WITH_ROW, "session/test_offload.py::test_compiled_sessions_refuse_it"),
        Row("a step in a CUDA graph", WORKS,
            "session/test_cuda_graphs_gpu.py::test_a_captured_step_has_the_losses_of_the_uncaptured_run"),
        Row("a CUDA graph of a session with a guard", REFUSED,
            "session/test_cuda_graphs_gpu.py::test_a_session_with_a_guard_refuses_a_capture"),
    ),
    "Frameworks": (
        Row("Hugging Face `Trainer`", WORKS, "integrations/test_hugging_face.py::test_a_plan_at_work_in_a_trainer_with_its_defaults"),
        Row("optimizers of `Trainer` without an equal here (Adafactor)", REFUSED,
            "integrations/test_hugging_face.py::test_an_optimizer_without_an_equal_is_kept_or_refused"),
        Row("TRL: SFT, DPO, GRPO", WORKS, "integrations/test_trl.py::test_saved_adapters_are_plain_peft_adapters"),
        Row("TRL's own loss in chunks beside `chunked_loss=True`", WITH_ROW,
            "integrations/test_trl.py::test_the_chunked_loss_of_trl_is_left_with_a_row"),
        Row("PEFT: LoRA over a packed base", WORKS,
            "integrations/test_peft.py::test_a_frozen_base_is_stored_in_4_bits_also_without_its_adapters"),
        Row("bases that bitsandbytes or torchao quantized", WITH_ROW,
            "session/test_frozen_weights.py::test_bases_quantized_by_other_libraries_stay_unmodified_and_are_counted"),
        Row("Accelerate", WORKS, "integrations/test_accelerate.py::test_saved_states_go_on_bit_for_bit"),
        Row("Lightning", WORKS, "integrations/test_lightning.py::test_a_resumed_fit_goes_on_bit_for_bit"),
        Row("Fabric", WORKS, "integrations/test_lightning.py::test_the_plugin_of_fabric_is_the_plan_and_the_other_plugin"),
        Row("diffusers, LoRA", WORKS, "test_examples.py::test_the_base_of_a_diffusion_transformer_is_small"),
    ),
    "Several processes": (
        Row("DDP, activations", WORKS, "session/test_distributed.py::test_two_processes"),
        Row("DDP, packed weights", WORKS, "session/test_weights_distributed.py::test_two_processes"),
        Row("FSDP2: weights, gradients and moments packed", WORKS, "session/test_sharded.py::test_codes_are_those_of_one_process"),
        Row("FSDP2 with padded shards", WITH_ROW, "session/test_sharded.py::test_padding_has_a_row"),
        Row("FSDP2 with `CPUOffloadPolicy`, an integer `reshard_after_forward`, shards along other dimensions", WITH_ROW,
            "session/test_sharded.py::test_what_stays_plain_has_a_reason_in_all_processes"),
        Row("`session.compile()` under DDP and FSDP2", WORKS,
            "session/test_compiled_distributed.py::test_graphs_pack_in_several_processes"),
        Row("gradients reduced in 8 bits", WORKS, "optim/test_distributed.py::test_two_processes"),
    ),
    "Optimizers": (
        Row("SGD, AdamW, Lion of `paredown.optim`", WORKS, "optim/test_optimizers.py::test_full_equals_torch_bit_for_bit"),
        Row("Muon", WORKS, "optim/test_muon.py::test_matrices_are_those_of_torch_bit_for_bit"),
        Row("schedulers, closures, parameter groups", WORKS, "optim/test_optimizers.py::test_schedulers_and_closures"),
        Row("torch's optimizers over packed gradients", WORKS, "optim/test_gradients.py::test_torchs_own_optimizers_take_them"),
        Row("formats of moments without an optimizer of `paredown.optim`", WITH_ROW,
            "session/test_session.py::test_formats_of_gradients_and_moments_are_rows_without_an_optimizer_for_them"),
        Row("gradient release with clipping", REFUSED, "optim/test_release.py::test_clipping_raises_and_says_why"),
    ),
    "Devices": (
        Row("CPU: x86-64, plain torch or numba", WORKS, "codec/test_cpu.py"),
        Row("Triton kernels, interpreted", WORKS, "codec/test_kernels.py"),
        Row("Triton kernels, compiled for compute capability 9.0", WORKS,
            "codec/test_kernels_compile.py::test_kernels_compile_for_capability_9"),
        Row("CUDA", WORKS, "codec/test_kernels_gpu.py"),
    ),
}  # fmt: skip
USES = {
    "value": "in a format", "sign": "one exact bit", "inside": "one exact bit", "mask": "one exact bit",
    "index": "exact integers, as narrow as their bound", "shape": "nothing", "exact": "unmodified",
}  # fmt: skip


INTRODUCTION = """# Compatibility

What works, what works with a row in `session.changes` (what is stored otherwise than planned, and why), and what is refused with an error
that says what to do instead. `benchmarks/compatibility.py` makes this page: each row names its test, and how that ended at {commit} with
torch {torch} on a CPU; what was skipped has not been shown here. All limits: [limits](limits.md).
"""
NETWORKS = """## Networks

The networks of `benchmarks/zoo_networks.py`, none of which paredown was tuned for. All work: each is traced and trained in 8 bits at a
small size on a CPU, with gradients beside those of the unmodified network (`tests/test_zoo.py`). Ratios of memory and time are those of
compiled steps to plain `torch.compile` ([benchmarks](benchmarks.md#networks-that-nothing-was-tuned-for)); networks without them were not
measured. Rows of `session.changes` name slots that have another format than `int8/64@bf16`, or none, for these reasons:
"""
VERSIONS = f"""## Versions of torch

{FLOOR} is the oldest that is allowed.
"""
OPERATIONS = """## Operations

How a plan may store what operations save for backward. All other saved floats stay unmodified. Random programs of {num} expressions
(`tests/programs/operations.txt`) are compared with unmodified runs in `tests/programs/test_programs.py`.
"""


def outcomes(known: dict[str, str]) -> dict[str, str]:
    """The outcome of each row's test: passed, or why it was skipped; a failure ends this program. Those that are known do not run."""
    wanted = sorted({row.test for rows in ROWS.values() for row in rows})
    tests = [test for test in wanted if test not in known]
    with tempfile.NamedTemporaryFile(suffix=".xml") as file:
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={file.name}", *(f"tests/{test}" for test in tests)]
        subprocess.run(command, cwd=ROOT, check=True)
        found: dict[str, list[str]] = {}
        for case in ElementTree.parse(file.name).iter("testcase"):
            path = f"{case.attrib['classname'].removeprefix('tests.').replace('.', '/')}.py"
            skipped = case.find("skipped")
            outcome = "passed" if skipped is None else f"skipped: {skipped.attrib['message']}"
            for name in (path, f"{path}::{case.attrib['name'].partition('[')[0]}"):
                found.setdefault(name, []).append(outcome)
    new = {test: "passed" if "passed" in found[test] else found[test][0] for test in tests}
    return {test: {**known, **new}[test] for test in wanted}


def networks() -> list[dict[str, Any]]:
    """Each network of the zoo at its small size after a step in 8 bits on the CPU: how many rows its session has, by reason."""
    import torch
    from zoo_networks import ZOO

    import paredown as pare

    rows: list[dict[str, Any]] = []
    for name, network in ZOO.items():
        torch.manual_seed(0)
        model = network.model(small=True)
        with pare.apply(pare.Plan.preset("activations8"), model) as session:
            model(**network.batch(True)).loss.backward()
            reasons = Counter(_first_clause(change.reason) for change in session.changes)
        rows.append({"network": name, "kind": network.kind, "reasons": dict(reasons.most_common())})
    return rows


def _first_clause(reason: str) -> str:
    return re.split("[,:;]", reason)[0]


def operations() -> list[tuple[str, ...]]:
    """Operations of which backward needs a saved tensor in another form than unmodified, by what a plan may do with it."""
    from paredown.autograd.operations import ROWS as KNOWN

    stored: dict[str, dict[str, str]] = {}
    for row in KNOWN.values():
        operands = [*row.operands.values(), *([row.others] if row.others else [])]
        stored.setdefault(row.op, {}).update({one.name: USES[one.use.value] for one in operands})
    alike: dict[str, list[str]] = {}
    for op, found in sorted(stored.items()):
        if changed := {name: how for name, how in found.items() if how != USES["exact"]}:
            alike.setdefault("; ".join(f"{name} {how}" for name, how in changed.items()), []).append(f"`{op}`")
    return [(how, ", ".join(ops)) for how, ops in alike.items()]


def network_rows(found: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Networks by kind: the numbers of reasons for other formats, small on a CPU, and ratios at full size where these were measured."""
    measured: dict[str, list[str]] = {}
    for network, way, row, base in compiled_networks():
        ratios = ", ".join(relative(row, base, name) for name in ("peak_bytes", "median_seconds"))
        measured.setdefault(network, []).append(f"{way}: {ratios}, {row['num_changes']} rows")
    numbers = {reason: number for number, reason in enumerate(reasons_of(found), 1)}
    rows = sorted(found, key=lambda row: row["kind"])
    return [
        (row["kind"], f"`{row['network']}`", ", ".join(map(str, sorted(numbers[reason] for reason in row["reasons"]))),
         "; ".join(measured.get(row["network"], ())))
        for row in rows
    ]  # fmt: skip


def reasons_of(found: list[dict[str, Any]]) -> list[str]:
    """The reasons why slots of any network are not stored as planned, the most frequent first."""
    return [reason for reason, _ in Counter(reason for row in found for reason in row["reasons"]).most_common()]


def versions() -> list[tuple[str, ...]]:
    """Versions of torch: those that results were measured with, and that of the tests."""
    run = json.loads(FILE.read_text())
    counts: Counter[tuple[str, str]] = Counter()
    for file in sorted(RESULTS.glob("*.json")):
        for one in json.loads(file.read_text()) if file != FILE else ():
            if isinstance(one, dict) and one.get("versions", {}).get("torch"):
                counts[one["versions"]["torch"].partition("+")[0], one["device"]] += 1
    measured = [(torch, device, f"{num} runs of benchmarks") for (torch, device), num in sorted(counts.items())]
    return [*measured, (run["versions"]["torch"].partition("+")[0], "x86_64 CPU", "all tests")]


def page() -> str:
    """The page, from results and the table of operations."""
    run = json.loads(FILE.read_text())
    parts = [INTRODUCTION.format(commit=run["commit"], torch=run["versions"]["torch"])]
    for title, rows in ROWS.items():
        cells = [(row.what, row.state, f"`tests/{row.test}`", run["tests"][row.test]) for row in rows]
        parts.append(f"## {title}\n\n{markdown(('', 'state', 'test', 'there'), cells)}")
    head = ("kind", "network", "reasons of rows", "full size, one H200: memory, time, rows")
    reasons = "".join(f"{number}. {reason}\n" for number, reason in enumerate(reasons_of(run["networks"]), 1))
    parts.append(f"{NETWORKS}\n{reasons}\n{markdown(head, network_rows(run['networks']))}")
    parts.append(f"{VERSIONS}\n{markdown(('torch', 'device', 'what ran'), versions())}")
    parts.append(f"{OPERATIONS}\n{markdown(('saved tensors', 'operations'), operations())}".format(num=num_programmed()))
    return "\n".join(parts)


def num_programmed() -> int:
    """Expressions that random programs are made of."""
    lines = (ROOT / "tests" / "programs" / "operations.txt").read_text().splitlines()
    return sum(" | " in line and not line.startswith("#") for line in lines)


def main() -> None:
    """Run, or write, or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--new", action="store_true", help="run only tests that have no outcome yet")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--commit", help="of the package, if it is not that of this checkout")
    options = parser.parse_args()
    if options.run or options.new:
        before = json.loads(FILE.read_text()) if options.new else {}
        found = {**machine("cpu", PACKAGES, options.commit), "tests": outcomes(before.get("tests", {}))}
        FILE.write_text(json.dumps({**found, "networks": before.get("networks") or networks()}, indent=1) + "\n")
    if options.write:
        PAGE.write_text(page())
    elif not (options.run or options.new):
        print(page())


if __name__ == "__main__":
    main()
