"""Tasks by name: which task a text names, the name of that task, and errors for texts that name none."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paredown.errors import TaskError
from paredown.models import MODELS, OF_PIXELS, OF_TEXT
from paredown.study.tasks.lookup import find_task
from paredown.study.tasks.task import OptimizerSettings, Task, task_family
from tests.study.tasks.made import CPU, make_task, write_npz

OF_CLASSES = [name for name in MODELS if name not in OF_TEXT | OF_PIXELS]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and no other data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PAREDOWN_DATA", raising=False)
    return tmp_path


def forward(task: Task) -> torch.Tensor:
    """What a fresh model says of two test examples."""
    x, _ = next(task.data.tests(2, device=CPU))
    with torch.no_grad():
        return task.make_model(0).eval()(x)


@pytest.mark.parametrize("model", OF_CLASSES)
def test_every_model_learns_pictures(model: str) -> None:
    task = find_task(f"digits#model={model},side=32")
    assert forward(task).shape == (2, 10)
    assert task.steps == 10 * (1437 // 32)


@pytest.mark.parametrize("model", sorted(OF_TEXT))
def test_every_model_of_text_learns_texts(model: str, here: Path) -> None:
    (here / "a.txt").write_text("to be or not to be " * 100)
    task = find_task(f"text:a.txt#model={model},length=24,dim=16")
    assert forward(task).shape == (2, 24, 256)
    assert (task.metric, task.blind_loss) == ("loss", pytest.approx(math.log(256)))


def test_options_reach_task_optimizer_data_and_model() -> None:
    task = find_task(
        "digits#model=vit,steps=7,batch=16,lr=0.002,schedule=constant,max_norm=2,loss_scale=1024,autocast=bf16,dim=32,shift=1"
    )
    assert (task.steps, task.batch, task.autocast) == (7, 16, torch.bfloat16)
    settings = task.settings
    assert (settings.optimizer, settings.lr, settings.schedule, settings.max_norm, settings.loss_scale) == (
        "adamw",
        0.002,
        "constant",
        2,
        1024,
    )
    assert task.make_model(0).get_parameter("norm.weight").shape == (32,)
    assert task.data.look.shift == 1  # type: ignore[attr-defined]


def test_a_name_is_the_same_in_any_order_and_finds_its_task_again(here: Path) -> None:
    write_npz(here / "a.npz")
    one, other = find_task("images:a.npz#steps=5,batch=9,mirror=yes"), find_task(" images:a.npz # mirror=true, batch=9,steps=5 ")
    assert one.name == other.name == "images:a.npz#batch=9,mirror=True,steps=5"
    again = find_task(one.name)
    assert again.name == one.name and repr(again) == repr(one)


def test_no_absolute_path_is_in_a_name(here: Path) -> None:
    write_npz(here / "a.npz")
    (here / "sub").mkdir()
    assert find_task(f"images:{here / 'a.npz'}#batch=9").name == "images:a.npz#batch=9"
    assert find_task("images:sub/../a.npz#batch=9").name == "images:a.npz#batch=9"
    with pytest.raises(TaskError) as caught:
        find_task(f"images:{here / 'b.npz'}")
    assert str(here) not in str(caught.value)
    with pytest.raises(TaskError, match="must not be an absolute path"):
        replace(make_task(), name="/home/me/task")
    with pytest.raises(TaskError, match="must not be an absolute path"):
        replace(make_task(), name="C:\\me\\task")


def test_data_is_found_where_the_variable_says(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "data" / "images").mkdir(parents=True)
    write_npz(here / "data" / "images" / "a.npz")
    with pytest.raises(TaskError, match=r"there is no a\.npz in this folder\."):
        find_task("images:a.npz#batch=9")
    monkeypatch.setenv("PAREDOWN_DATA", str(here / "data"))
    assert find_task("images:a.npz#batch=9").data.num_train == 30
    with pytest.raises(TaskError, match=r"there is no b\.npz in this folder or under PAREDOWN_DATA\. Closest: 'a\.npz'"):
        find_task("images:b.npz")


def test_a_task_starts_from_weights_of_a_file(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = find_task("digits#model=mlp,width=16").make_model(0)
    state = {**trained.state_dict(), "layers.4.weight": torch.ones(3, 16)}  # a head for three answers
    torch.save(state, here / "w.pt")
    torch.save({"other": torch.ones(2)}, here / "other.pt")
    (here / "text.pt").write_text("no weights")
    model = find_task("digits#model=mlp,width=16,start=w.pt").make_model(1)
    assert torch.equal(model.state_dict()["layers.0.weight"], state["layers.0.weight"])
    assert model.state_dict()["layers.4.weight"].shape == (10, 16)
    assert "w.pt: 1 of 6 tensors of the model are not in it with their shape, and stay new: layers.4.weight" in caplog.text
    for file, said in (
        ("other.pt", "no weight of this model"),
        ("text.pt", r"text.pt cannot be read as weights: .* Write it by torch.save"),
        ("no.pt", "there is no no.pt"),
    ):
        with pytest.raises(TaskError, match=said):
            find_task(f"digits#model=mlp,start={file}").make_model(0)
    with pytest.raises(TaskError, match=r"without '\.\.'"):
        find_task("digits#model=mlp,start=../w.pt")
    assert task_family(find_task("digits#model=mlp,start=no.pt")) == "mlp", "needs no values"


def test_the_loss_can_be_the_error_of_a_trial() -> None:
    assert find_task("digits#model=mlp,metric=loss").metric == "loss" and find_task("digits#model=mlp").metric == "error"
    with pytest.raises(TaskError, match="metric 'best' is unknown"):
        find_task("digits#model=mlp,metric=best")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("digit", "task 'digit' is unknown. Closest: 'digits'. Allowed: digits, fashion_mnist, images:FILE"),
        ("fasion_mnist", "Closest: 'fashion_mnist'"),
        ("images:", "task 'images:' is unknown"),
        ("", "task '' is unknown"),
        ("digits#model=resnet81", "model 'resnet81' is unknown. Closest: 'resnet18'"),
        ("digits#model=gpt", "model 'gpt' is not for pictures. Allowed: mlp, resnet18"),
        ("digits#model=unet", "an answer for each pixel"),
        ("digits#widht=8", "model 'resnet18' cannot be made of .*widht=8.*argument 'widht'.* It takes num_classes, width"),
        ("digits#model=convnext", "model 'convnext' does not take examples of 3 x 8 x 8: .*Resize the pictures with side=32"),
        ("digits#steps=many", "option steps=many cannot be read; it must be of type int: training steps"),
        ("digits#steps", "option 'steps' cannot be read: options are name=value"),
        ("digits#steps=3,steps=4", "option 'steps' appears twice"),
        ("digits#steps=0", "steps is 0; it must be a whole number from 1 up"),
        ("digits#batch=0", "batch is 0"),
        ("digits#batch=2000", "a batch of 2000 is larger than the 1437 training examples. Take a smaller batch"),
        ("digits#length=3", "option 'length' does not apply to pictures"),
        ("digits#superclass=3", "digits has no superclasses"),
        ("digits#side=0", "side is 0"),
        ("digits#shift=8", "shift is 8"),
        ("digits#lr=-1", "lr is -1.0; it must be above 0"),
        ("digits#optimizer=adam,lr=1", "optimizer 'adam' is unknown. Closest: 'adamw'"),
        ("digits#optimizer=lion", "optimizer=lion needs lr="),
        ("digits#autocast=int8", "autocast 'int8' is unknown. Allowed: bf16, fp16, none"),
        ("digits#schedule=steep", "schedule 'steep' is unknown"),
        ("text:a.txt#side=3", "option 'side' does not apply to text"),
        ("text:a.txt#length=0", "length is 0"),
        ("text:a.txt#model=resnet18", "model 'resnet18' is not for text. Allowed: gpt, lstm"),
        ("text:a.txt#num_heads=5,dim=16", "model 'gpt' cannot be made of|does not take examples of 64"),
        ("text:.", "is a folder; give a file"),
    ],
)  # fmt: skip
def test_unknown_and_impossible_tasks(text: str, said: str, here: Path) -> None:
    (here / "a.txt").write_text("to be or not to be " * 100)
    with pytest.raises(TaskError, match=said):
        find_task(text)


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(TaskError, match="the name of a task is a str, not NoneType"):
        find_task(None)  # type: ignore[arg-type]


# --- files of the user ------------------------------------------------------------------------------------------------

OWN = """
from dataclasses import dataclass
import beside
from tests.study.tasks.made import make_task

@dataclass
class Choice:
    steps: int

def mine(steps: int = 3):
    return make_task(steps=Choice(steps).steps + beside.MORE)

def wrong():
    return 3

def raises():
    raise KeyError("oh")

def leaves():
    raise SystemExit(3)

NUMBER = 3
"""


@pytest.fixture
def own(here: Path) -> Path:
    """A folder with a task file and what it imports."""
    (here / "tasks").mkdir()
    (here / "tasks" / "own.py").write_text(OWN)
    (here / "tasks" / "beside.py").write_text("MORE = 1\n")
    (here / "outside.py").write_text("open('was_run', 'w')\ndef mine(): ...\n")
    return here


def test_a_function_of_a_file(own: Path) -> None:
    assert find_task("tasks/own.py:mine").steps == 4
    assert find_task("own.py:mine#steps=8", own / "tasks").steps == 9
    assert find_task(f"{own}/tasks/own.py:mine", own / "tasks").steps == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("own.py:mien", r"own\.py has no function 'mien'. Closest: 'mine'"),
        ("own.py:NUMBER", r"own\.py has no function 'NUMBER'"),
        ("own.py:wrong", "wrong returned int; it must return a paredown.Task"),
        ("own.py:raises", r"own\.py raised KeyError: 'oh'"),
        ("own.py:leaves", r"own\.py raised SystemExit: 3"),
        ("own.py:mine#colour=3", r"own\.py raised TypeError: .*'colour'"),
        ("other.py:mine", "there is no file other.py"),
    ],
)
def test_files_that_give_no_task(text: str, said: str, own: Path) -> None:
    with pytest.raises(TaskError, match=said):
        find_task(text, own / "tasks")


def test_what_a_file_raised_is_the_cause(own: Path) -> None:
    with pytest.raises(TaskError) as caught:
        find_task("own.py:raises", own / "tasks")
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("text", ["../outside.py:mine", "{here}/outside.py:mine", "link.py:mine", "sub/../../outside.py:mine"])
def test_nothing_outside_of_the_folder_is_run(text: str, own: Path) -> None:
    (own / "tasks" / "link.py").symlink_to(own / "outside.py")
    (own / "tasks" / "sub").mkdir()
    with pytest.raises(TaskError, match="outside of the tasks folder, and is not run"):
        find_task(text.format(here=own), own / "tasks")
    assert not (own / "was_run").exists()


def test_data_of_a_worker_comes_from_its_folder(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_npz(own / "a.npz")
    (own / "tasks" / "link.npz").symlink_to(own / "a.npz")
    for text in ("images:../a.npz", f"images:{own / 'a.npz'}", "images:link.npz"):
        with pytest.raises(TaskError, match="is outside of the tasks folder"):
            find_task(f"{text}#batch=9", own / "tasks")
    with pytest.raises(TaskError, match=r"there is no b\.npz in the tasks folder\.$"):
        find_task("images:b.npz", own / "tasks")
    monkeypatch.setenv("PAREDOWN_DATA", str(own))
    assert find_task("images:a.npz#batch=9", own / "tasks").data.num_train == 30


# --- tasks in Python --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": 129}, "task 'blobs': a batch of 129 is larger than the 128 training examples"),
        ({"steps": 2.5}, r"steps is 2\.5"),
        ({"metric": "accuracy"}, "metric 'accuracy' is unknown. Allowed: error, loss, or a function"),
        ({"autocast": "bf16"}, "autocast is a dtype"),
        ({"name": " "}, "a task needs a name"),
        ({"name": "a\nb"}, "a task needs a name, one line"),
        ({"data": [1]}, "data is of type list; pass paredown.study.tasks.data.Examples or Text"),
    ],
)
def test_tasks_that_do_not_fit_together(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        replace(make_task(), **changes)


def test_optimizer_settings_that_are_refused() -> None:
    for changes, said in (({"max_norm": 0.0}, "max_norm is 0.0"), ({"optimizer": "adam"}, "Closest: 'adamw'")):
        with pytest.raises(TaskError, match=said):
            OptimizerSettings(**changes)


def test_a_task_prints_what_it_is() -> None:
    said = "Task(blobs: 12 steps of 32, sgdm at 0.1; 128 training examples, 64 test examples, 4 answers)"
    assert repr(make_task(lambda seed: nn.Linear(16, 4))) == said
