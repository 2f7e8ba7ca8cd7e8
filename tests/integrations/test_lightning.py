"""Lightning's Trainer and Fabric under plans: clipping, checkpoints, loggers, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paredown as pare
from paredown.errors import ApplyError, VerificationError
from paredown.session.eager.stored_tensors import StoredValues

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own

from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.plugins.precision import MixedPrecision  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from paredown.integrations.lightning import PareCallback, PlanPrecision  # noqa: E402

PLAN = pare.Plan.preset("lpmm").set("activation", "int4/64@bf16")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8))


class Classifier(lightning.LightningModule):
    """`optimizer`: a class of optimizers; `calls`: the network as a part, or the whole module."""

    def __init__(self, optimizer: Any = None, **options: Any) -> None:
        super().__init__()
        self.net, self.optimizer, self.options = network(), optimizer or pare.optim.AdamW, options

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), **{"lr": 1e-3, **self.options})


def batches(size: int = 64) -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 64, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :8].argmax(1)), batch_size=size)


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    defaults = {"max_steps": 4, "enable_checkpointing": False, "default_root_dir": folder, "log_every_n_steps": 1}
    return lightning.Trainer(callbacks=list(callbacks), **{**quiet, **defaults, **options})


def assert_equal(found: nn.Module, wanted: nn.Module) -> None:
    pairs = zip(found.state_dict().items(), wanted.state_dict().items(), strict=True)
    assert not [name for (name, a), (_, b) in pairs if not torch.equal(a, b)]


def test_without_formats_it_is_lightning_with_torchs_optimizer(tmp_path: Path) -> None:
    plain, pared = Classifier(torch.optim.AdamW), Classifier()
    trainer(tmp_path, gradient_clip_val=0.1).fit(plain, batches())
    trainer(tmp_path, PareCallback(pare.Plan()), gradient_clip_val=0.1).fit(pared, batches())
    assert_equal(pared, plain)


def test_a_plan_at_work_its_numbers_and_the_plain_model_when_it_is_closed(tmp_path: Path) -> None:
    packed: list[int] = []
    model, callback = Classifier(), PareCallback(PLAN)
    look = type("Look", (lightning.Callback,), {"on_train_batch_end": lambda *a: packed.append(callback.session.weight_bytes)})
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    fit = trainer(tmp_path, callback, look(), logger=logger, gradient_clip_val=1.0, accumulate_grad_batches=2)
    fit.fit(model, batches())
    assert packed and min(packed) > 8192 + 16384
    assert callback.is_open and not any(
        p.untyped_storage().nbytes() for p in model.parameters() if p.ndim > 1 and p.numel() >= 4096
    )
    callback.close()
    assert not callback.is_open and all(p.untyped_storage().nbytes() for p in model.parameters())
    assert fit.optimizers[0].updates == 4
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    for name in ("memory/weight_gib", "memory/activation_gib", "memory/optimizer_gib", "updates/underflow"):
        assert float(rows[-1].split(",")[rows[0].split(",").index(name)]) >= 0


@pytest.mark.parametrize("prints", [True, False])
def test_the_summary_is_printed_at_the_end(prints: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = PareCallback(PLAN)
    callback.prints_summary = prints
    trainer(tmp_path, callback).fit(Classifier(), batches())
    assert callback.session is not None and callback.session.forwards
    assert ("paredown: Session of Sequential: " in capsys.readouterr().out) == prints


def test_a_resumed_fit_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """An epoch is one batch here: Lightning itself begins its data anew where it is resumed within one."""
    whole, later = Classifier(), Classifier()
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer(tmp_path, PareCallback(PLAN), keep, enable_checkpointing=True).fit(whole, batches(256))
    callback = PareCallback(PLAN)
    forwards: list[int] = []
    look = type("Look", (lightning.Callback,), {"on_train_batch_end": lambda *a: forwards.append(callback.session.forwards)})
    with torch.no_grad():
        later.net[0].weight.zero_()  # what a checkpoint has to bring back
    trainer(tmp_path, callback, look()).fit(later, batches(256), ckpt_path=str(tmp_path / "step=2.ckpt"))
    assert forwards == [3, 4]
    assert_equal(later, whole)
    stored = torch.load(tmp_path / "step=2.ckpt", weights_only=False)["state_dict"]
    assert all(type(value) is Tensor for value in stored.values()), "plain weights"


class Tuner(Classifier):
    """A frozen base with one layer on top that is trained, and validation."""

    def __init__(self, *, is_rounded: bool) -> None:
        super().__init__()
        self.net[:4].requires_grad_(False)
        for layer in (self.net[0], self.net[2]) if is_rounded else ():
            layer.weight.data.copy_(pare.round_trip(layer.weight.detach(), "nf4/64@bf16"))

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", cross_entropy(self.net(batch[0]), batch[1]))

    @property
    def base_bytes(self) -> int:
        """Bytes of the base's weights that are not packed."""
        return sum(layer.weight.untyped_storage().nbytes() for layer in (self.net[0], self.net[2]))


CPU = Tensor.cpu


def recorded(moved: list[Tensor], value: Tensor) -> Tensor:
    moved.append(value)
    return CPU(value)


def test_fit_validate_save_and_fit_again_over_a_base_that_stays_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, weights and files are those of a plain trainer over the rounded base."""
    ends: list[Any] = []
    for is_pared in (False, True):
        model, callback = Tuner(is_rounded=not is_pared), PareCallback(pare.Plan.preset("frozen4"))
        callback.prints_summary = False
        fit = trainer(tmp_path, *([callback] if is_pared else []), enable_checkpointing=True)
        found = [fit.validate(model, batches(), verbose=False)] if not is_pared else []
        for last in (2, 4):
            fit.fit_loop.epoch_loop.max_steps = last
            fit.fit(model, batches())
            assert not is_pared or (callback.is_open and model.base_bytes == 0), "nothing was decoded for good"
            found.append(fit.validate(model, batches(), verbose=False))
        before, decoded = model.base_bytes, list[Tensor]()
        if is_pared:
            monkeypatch.setattr(Tensor, "cpu", lambda value, moved=decoded: recorded(moved, value))
        fit.save_checkpoint(tmp_path / f"{is_pared}.ckpt")
        assert bool(decoded) == is_pared and model.base_bytes == before, "each decoded weight went to host memory"
        saved = torch.load(tmp_path / f"{is_pared}.ckpt", weights_only=False)["state_dict"]
        ends.append((found[-2:], {name: value.clone() for name, value in saved.items()}))
        if is_pared:
            assert all(type(value) is Tensor for value in saved.values())
            other = Tuner(is_rounded=False)
            fit.fit_loop.epoch_loop.max_steps = 6
            fit.fit(other, batches())
            assert model.base_bytes > 0 and other.base_bytes == 0, "the session of the first module was closed"
            callback.close()
            assert other.base_bytes > 0 and "lightning_module_state_dict" not in vars(fit.strategy)
            assert fit.validate(model, batches(), verbose=False) == found[-1]
    (plain, plain_saved), (pared, pared_saved) = ends
    assert pared == plain and pared_saved.keys() == plain_saved.keys()
    assert not [name for name, value in pared_saved.items() if not torch.equal(value, plain_saved[name])]


def test_the_part_that_is_called_is_found_or_asked_for(tmp_path: Path) -> None:
    class Two(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 8)

    with pytest.raises(ApplyError, match=r"PareCallback\(plan, module='net'\)"):
        trainer(tmp_path, PareCallback(PLAN, module="other")).fit(Two(), batches())
    with pytest.raises(ApplyError, match=r"has no part 'nett'\. It has 'net', 'other'"):
        trainer(tmp_path, PareCallback(PLAN, module="nett")).fit(Two(), batches())
    callback = PareCallback(PLAN, module="net")
    trainer(tmp_path, callback).fit(Two(), batches())
    with pytest.raises(ApplyError, match="has no option 'modul'"):
        PareCallback(PLAN, modul="net")


def test_lack_of_memory_is_explained_and_nothing_is_decoded(tmp_path: Path) -> None:
    class Short(Classifier):
        def training_step(self, batch: Any, index: int) -> Tensor:
            if index:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().training_step(batch, index)

    model = Short()
    trace = pare.trace_step(network(), (torch.empty(2048, 64), torch.empty(2048).long()), loss=cross_entropy, device="cpu")
    callback = PareCallback(PLAN, trace=trace)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer(tmp_path, callback).fit(model, batches())
    assert "grew most" in caught.value.__notes__[0]
    assert callback.is_open and not model.net[0].weight.untyped_storage().nbytes()
    callback.close()
    assert all(p.untyped_storage().nbytes() for p in model.parameters())


def test_fabric_needs_the_right_order_alone(tmp_path: Path) -> None:
    def run(*, resumes: bool) -> tuple[nn.Module, int]:
        fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
        model = network()
        session = pare.apply(PLAN, model)
        wrapped, opt = fabric.setup(model, pare.optim.AdamW(model.parameters(), lr=1e-3))
        state = {"model": wrapped, "opt": opt, "session": session.state_dict()}
        for step, (x, y) in enumerate(batches()):
            if step == 2 and resumes:
                fabric.load(tmp_path / "state.ckpt", state)
                session.load_state_dict(state["session"])
            if step >= 2 or not resumes:
                fabric.backward(cross_entropy(wrapped(x), y))
                fabric.clip_gradients(wrapped, opt, max_norm=1.0)
                opt.step()
                opt.zero_grad()
            if step == 1 and not resumes:
                fabric.save(tmp_path / "state.ckpt", {**state, "session": session.state_dict()})
        session.close()
        return model, session.forwards

    (whole, passes), (later, after) = run(resumes=False), run(resumes=True)
    assert passes == after == 4
    assert_equal(later, whole)


def fabric_steps(fabric: Any, wrapped: Any, opt: Any, *, first: int = 0, last: int = 4) -> None:
    """Some of four steps, with clipping."""
    for step, (x, y) in enumerate(batches()):
        if first <= step < last:
            fabric.backward(cross_entropy(wrapped(x), y))
            fabric.clip_gradients(wrapped, opt, max_norm=1.0)
            opt.step()
            opt.zero_grad()


@pytest.mark.parametrize("precision", ["bf16-mixed", "a plugin"])
def test_the_plugin_of_fabric_is_the_plan_and_the_other_plugin(precision: str) -> None:
    """The same bits as by hand."""
    by_hand, model = Fabric(accelerator="cpu", precision="bf16-mixed"), network()
    with pare.apply(PLAN, model):
        fabric_steps(by_hand, *by_hand.setup(model, pare.optim.AdamW(model.parameters(), lr=1e-3)))
    inner: Any = MixedPrecision("bf16-mixed", "cpu") if precision == "a plugin" else precision
    plugin, other = PlanPrecision(PLAN, inner), network()
    fabric = Fabric(accelerator="cpu", plugins=plugin)
    wrapped = fabric.setup_module(other)
    opt = fabric.setup_optimizers(pare.optim.AdamW(wrapped.parameters(), lr=1e-3))
    fabric_steps(fabric, wrapped, opt)
    assert plugin.session is not None and plugin.session.forwards == 4
    assert plugin.numbers()["memory/weight_gib"] < sum(p.numel() * 4 for p in network().parameters()) / 2**30
    plugin.teardown()
    assert not plugin.is_open and plugin.numbers() == {}
    assert_equal(other, model)


def test_the_plugin_of_fabric_goes_on_where_it_was(tmp_path: Path) -> None:
    def run(*, resumes: bool) -> nn.Module:
        plugin, model = PlanPrecision(PLAN, "bf16-mixed"), network()
        fabric = Fabric(accelerator="cpu", plugins=plugin)
        wrapped = fabric.setup_module(model)
        opt = fabric.setup_optimizers(pare.optim.AdamW(wrapped.parameters(), lr=1e-3))
        state = {"model": wrapped, "opt": opt, "session": plugin.session}
        if resumes:
            fabric.load(tmp_path / "state.ckpt", state)
        else:
            fabric_steps(fabric, wrapped, opt, last=2)
            fabric.save(tmp_path / "state.ckpt", state)
        fabric_steps(fabric, wrapped, opt, first=2)
        plugin.close()
        return model

    whole = run(resumes=False)
    assert_equal(run(resumes=True), whole)


def test_the_plugin_of_fabric_works_where_the_module_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, a Fabric for the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plugin = PlanPrecision(PLAN, "bf16-mixed")
    monkeypatch.undo()
    fabric = Fabric(accelerator="cpu", plugins=plugin)
    wrapped = fabric.setup_module(network())
    assert wrapped(torch.randn(4, 64)).dtype is torch.float32
    plugin.inner.device = "meta"
    wrapped(torch.randn(4, 64))
    assert plugin.inner.device == "cpu"
    plugin.close()


def test_what_the_plugin_of_fabric_refuses() -> None:
    with pytest.raises(ApplyError, match="'32-true', 'bf16-mixed', not '64-true'"):
        PlanPrecision(PLAN, "64-true")
    model = network()
    started = pare.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 64)).sum().backward()
    started.step()
    with pytest.raises(ApplyError, match=r"fabric\.setup_module"):
        Fabric(accelerator="cpu", plugins=PlanPrecision(PLAN)).setup(model, started)
    fabric = Fabric(accelerator="cpu", plugins=PlanPrecision(pare.Plan.preset("activations8")))
    fabric.setup(model, started)  # activations alone: with any optimizer
    with pytest.raises(ApplyError, match="applied to a model already"):
        fabric.setup(network())


def test_verify_checks_the_first_batch_and_changes_no_bit(tmp_path: Path) -> None:
    class Logs(Classifier):
        steps = 0

        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            self.steps += 1
            loss = super().training_step(batch, 0)
            self.log("loss", loss)
            return {"loss": loss}

    plain, checked = Logs(), Logs()
    trainer(tmp_path, PareCallback(PLAN), precision="bf16-mixed").fit(plain, batches())
    trainer(tmp_path, PareCallback(PLAN, verify=True), precision="bf16-mixed").fit(checked, batches())
    assert_equal(checked, plain)
    assert (plain.steps, checked.steps) == (4, 8), "baseline twice, exact plan, plan"


def test_verify_ends_a_fit_whose_gradients_are_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredValues, "_unpacked", lambda self: torch.zeros(self.numel, dtype=self.dtype))
    model, callback = Classifier(), PareCallback(PLAN, verify=True)
    with pytest.raises(VerificationError, match=r"(?s)off under the exact plan.*2:input"):
        trainer(tmp_path, callback).fit(model, batches())
    assert not callback.is_open and all(type(p) is nn.Parameter for p in model.parameters())

    class Manual(Classifier):
        automatic_optimization = False

    with pytest.raises(ApplyError, match="cannot run a training_step that steps its optimizers itself"):
        trainer(tmp_path, PareCallback(PLAN, verify=True)).fit(Manual(), batches())
