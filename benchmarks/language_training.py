"""Trainings of a GPT on text, for train_long.py and for the job `lora_accuracy` of bench_language.py.

A training is a sequence of pieces: it saves its state every few steps and when its time ends, and a later call continues from the last
state, with the same curve. Runs of one seed start with the same weights and see the same batches. The last 5 % of a corpus are the
validation split.

`lora_accuracy`: adapters of rank 16 (PEFT, in float32) adapt the baseline model of each seed, which train_long.py has trained with the same
folder of states, to the Python manual in 400 steps, over a base in bfloat16 and over the same base in nf4.
"""

from __future__ import annotations

import gzip
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from language_steps import RANK
from torch import Tensor, nn

import paredown as pare
from paredown.models.transformer import GPT, GPTConfig
from paredown.optim import AdamW
from paredown.roles import Role

VOCABULARY = 8192
VALIDATION_SHARE, NUM_VALIDATION = 0.05, 48  # of the tokens; batches
TOKENS = "tokens.npz"
ADDRESSES, MANUAL = "sotu_en", "pydoc_en"  # of PAREDOWN_DATA
GPT_30M = GPTConfig(dim=512, num_layers=8, num_heads=8, vocabulary=VOCABULARY, context=256)
OWN_STATE = (Role.WEIGHT, Role.GRADIENT, Role.MOMENT1, Role.MOMENT2)  # roles that an optimizer of paredown stores


@dataclass(frozen=True)
class Setting:
    """Model, length and data of a training."""

    num_steps: int
    learning_rate: float
    size: int = 8
    length: int = 256
    config: GPTConfig = GPT_30M
    text: str = ADDRESSES  # the name of the corpus in the file of tokens
    every: int = 500  # steps between validation losses and saved states

    def rate(self, step: int) -> float:
        """Linear warm-up over the first 5 % of the steps, then a cosine to a tenth."""
        warm = max(self.num_steps // 20, 1)
        share = min(max(step - warm, 0) / max(self.num_steps - warm, 1), 1.0)
        return self.learning_rate * min((step + 1) / warm, 1.0) * (0.55 + 0.45 * math.cos(math.pi * share))


# --- data -------------------------------------------------------------------------------------------------------------


def packed_texts(data: Path) -> dict[str, str]:
    """Both corpora of PAREDOWN_DATA."""
    return {name: gzip.decompress((data / "text" / f"{name}.txt.gz").read_bytes()).decode() for name in (ADDRESSES, MANUAL)}


def write_tokens(texts: Mapping[str, str], to: Path, vocabulary: int = VOCABULARY) -> None:
    """Train a byte-level BPE on all texts, and write their tokens to `to`, unless the file is there."""
    if to.exists():
        return
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    lines = {name: text.splitlines(keepends=True) for name, text in texts.items()}
    tokenizer.train_from_iterator((line for part in lines.values() for line in part), trainer)
    write_ids({name: np.concatenate([one.ids for one in tokenizer.encode_batch(part)]) for name, part in lines.items()}, to)


def write_ids(ids: Mapping[str, Any], to: Path) -> None:
    """Write token ids by name of the corpus."""
    to.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {name: np.asarray(one).astype(np.uint16) for name, one in ids.items()}
    part = to.with_suffix(".part.npz")
    np.savez_compressed(part, **arrays)
    part.replace(to)


@dataclass(frozen=True)
class Corpus:
    """Tokens on a device, and the pieces that a step sees."""

    train: Tensor
    validation: Tensor
    size: int
    length: int

    @staticmethod
    def read(path: Path | None, setting: Setting, device: str) -> Corpus:
        """The corpus of a setting from a file of tokens; random tokens without a file."""
        if path is None:
            ids = torch.randint(setting.config.vocabulary, (20_000,), generator=torch.Generator().manual_seed(0))
        else:
            with np.load(path) as file:
                ids = torch.from_numpy(file[setting.text].astype(np.int64))
        cut = int(len(ids) * (1 - VALIDATION_SHARE))
        return Corpus(ids[:cut].to(device), ids[cut:].to(device), setting.size, setting.length)

    def batch(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """The pieces of one step: the same for all ways of a seed, whether or not a run was continued."""
        source = torch.Generator().manual_seed(1_000_003 * seed + step)
        starts = torch.randint(len(self.train) - self.length, (self.size, 1), generator=source)
        places = (starts + torch.arange(self.length + 1)).to(self.train.device)
        tokens = self.train[places]
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def validation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of the validation split, one after the other."""
        piece = self.length + 1
        num = min(len(self.validation) // piece, NUM_VALIDATION * self.size)
        for rows in self.validation[: num * piece].view(num, piece).split(self.size):
            yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# --- one training -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """What a run trains: the model, the function that computes its losses (compiled or the model itself), optimizer and session."""

    model: nn.Module
    network: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    session: pare.Session | None


@dataclass(frozen=True)
class Training:
    """One run. `plan` None is the unmodified step; `path`: the file of its state; `make`: the model at its start."""

    setting: Setting
    plan: pare.Plan | None
    seed: int
    device: str
    path: Path
    make: Callable[[], nn.Module]
    is_compiled: bool = False
    chunked: bool = False

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW: of paredown where the plan has a format for what it updates."""
        trained = [p for p in model.parameters() if p.requires_grad]
        options: dict[str, Any] = {"lr": self.setting.learning_rate, "betas": (0.9, 0.95), "weight_decay": 0.1}
        if self.plan is not None and any(self.plan.find(("",), role).format for role in OWN_STATE):
            return AdamW(trained, **options, seed=self.seed)
        return torch.optim.AdamW(trained, **options, fused=True)

    def loss(self, model: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean loss of a batch, under bf16 autocast on a GPU."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            return model(*batch).loss

    @torch.no_grad()
    def validation_loss(self, model: nn.Module, corpus: Corpus) -> float:
        """The mean loss on the validation split."""
        model.eval()
        found = torch.stack([self.loss(model, batch).float() for batch in corpus.validation_batches()])
        model.train()
        return float(found.mean())

    def run(self, corpus: Corpus, deadline: float = math.inf) -> dict[str, Any] | None:
        """Train on from the last saved state; the fields of the row, or None if time.monotonic() reaches `deadline` before the end."""
        model = self.make()
        state: dict[str, Any] = torch.load(self.path, map_location=self.device) if self.path.exists() else {}
        if state:
            model.load_state_dict(state["model"])
        with ExitStack() as stack:
            session = None
            if self.plan is not None:
                session = stack.enter_context(pare.apply(self.plan, model, seed=self.seed, chunked_loss=self.chunked))
            optimizer = self.optimizer(model)
            if state:
                optimizer.load_state_dict(state["optimizer"])
            if state and session is not None:
                session.load_state_dict(state["session"])
            network = model if not self.is_compiled else torch.compile(model) if session is None else session.compile()
            if not state:
                state = {"step": 0, "seconds": 0.0, "total": 0.0, "curve": [(0, self.validation_loss(model, corpus), None)]}
            self._train(Parts(model, network, optimizer, session), corpus, state, deadline)
            changes = None if session is None else len(session.changes)
        if state["step"] < self.setting.num_steps:
            return None
        about = {"num_steps": self.setting.num_steps, "shape": [self.setting.size, self.setting.length], "num_changes": changes}
        curve = [list(point) for point in state["curve"]]
        return {**about, "validation_loss": curve[-1][1], "curve": curve, "step_seconds": state["seconds"] / self.setting.num_steps}

    def _train(self, parts: Parts, corpus: Corpus, state: dict[str, Any], deadline: float) -> None:
        """Steps until the last one or the deadline. `state`: steps and seconds so far, training losses since the last point, the curve."""
        total, begun = torch.tensor(state["total"], dtype=torch.float64, device=self.device), time.perf_counter()
        while state["step"] < self.setting.num_steps:
            total += self._step(parts, corpus.batch(self.seed, state["step"]), self.setting.rate(state["step"]))
            state["step"] += 1
            is_point = state["step"] % self.setting.every == 0 or state["step"] == self.setting.num_steps
            is_late = time.monotonic() > deadline
            if is_point or is_late:
                state["total"] = float(total)  # waits for the device
                state["seconds"] += time.perf_counter() - begun
                if is_point:
                    self._add_point(parts.model, corpus, state)
                    total.zero_()
                self._save(state, parts)
                begun = time.perf_counter()
            if is_late:
                return

    def _step(self, parts: Parts, batch: tuple[Tensor, Tensor], rate: float) -> Tensor:
        """The loss of one training step."""
        for group in parts.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(parts.network, batch)
        loss.backward()
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _add_point(self, model: nn.Module, corpus: Corpus, state: dict[str, Any]) -> None:
        """Add (step, validation loss, mean training loss since the last point) to the curve."""
        since = state["step"] - state["curve"][-1][0]
        state["curve"].append((state["step"], self.validation_loss(model, corpus), state["total"] / since))
        state["total"] = 0.0

    def _save(self, state: dict[str, Any], parts: Parts) -> None:
        """Write the state, at once: a run that is killed here leaves the last one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        weights = {name: tensor.detach().clone() for name, tensor in parts.model.state_dict().items()}
        more = {"session": parts.session.state_dict()} if parts.session is not None else {}
        torch.save({**state, "model": weights, "optimizer": parts.optimizer.state_dict(), **more}, part)
        part.replace(self.path)


def new_gpt(config: GPTConfig, seed: int, device: str) -> nn.Module:
    """A GPT with the weights that all runs of a seed start with."""
    torch.manual_seed(seed)
    with torch.device(device):
        return GPT(config)


def state_path(states: Path, name: str, way: str, seed: int) -> Path:
    """The file of the state of a run."""
    return states / f"{name}-{way}-{seed}.pt"


# --- adapters of a trained model ----------------------------------------------------------------------------------------

LORA, BASE = "lora_accuracy", "30m"  # the job, and the setting of train_long.py whose baseline it adapts
LORA_TARGETS = ["qkv", "project", "mlp.0", "mlp.2"]
LORA_SETTING = Setting(400, 1e-3, text=MANUAL, every=400)
QUICK_SETTING = Setting(4, 1e-3, 2, 32, GPTConfig(dim=64, num_layers=2, num_heads=2, vocabulary=VOCABULARY, context=32), MANUAL, 2)
LORA_PLANS: dict[str, Callable[[], pare.Plan | None]] = {"bf16": lambda: None, "nf4": lambda: pare.Plan.preset("frozen4")}
TRAININGS = {LORA: tuple(LORA_PLANS)}  # job -> ways


def adapted(config: GPTConfig, seed: int, device: str, base: Path | None) -> nn.Module:
    """Adapters over the model of the state in `base`, in bfloat16; None: a model that is not trained."""
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]

    model = new_gpt(config, seed, device)
    if base is not None and not base.exists():
        raise FileNotFoundError(f"{base} is missing: run train_long.py --arm baseline with the same folder of states first.")
    if base is not None:
        model.load_state_dict(torch.load(base, map_location=device)["model"])
    torch.manual_seed(seed)
    return get_peft_model(model.bfloat16(), LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LORA_TARGETS))  # type: ignore[arg-type]


def training_fields(request: dict[str, Any]) -> dict[str, Any]:
    """The fields of one row of `lora_accuracy`."""
    states, (way, seed, device) = Path(request["states"]), (request[key] for key in ("way", "seed", "device"))
    setting, tokens, base = LORA_SETTING, states / TOKENS, state_path(states, BASE, "baseline", seed)
    if request["is_quick"]:
        setting, tokens, base = QUICK_SETTING, None, None
    make = lambda: adapted(setting.config, seed, device, base)  # noqa: E731
    training = Training(setting, LORA_PLANS[way](), seed, device, state_path(states, LORA, way, seed), make)
    fields = training.run(Corpus.read(tokens, setting, device))
    assert fields is not None, "there is no deadline"
    points = [point[:2] for point in fields.pop("curve")]
    return {**fields, "validation_losses": points, "median_seconds": fields.pop("step_seconds")}
