"""The jobs `accuracy` and `lora_accuracy` of bench_language.py: whether training still works.

`accuracy`: a GPT of 30M parameters (8 layers, width 512, tied embeddings, 8192 tokens of a byte-level BPE that is trained on both corpora)
learns State of the Union addresses from scratch: AdamW, bf16 autocast, 3000 steps of 8 x 256 tokens. All ways run in eager mode, since
compiled steps leave weights unpacked. The last 5 % of the corpus are the validation split. Runs of one seed start with the same weights
and see the same batches.

`lora_accuracy`: adapters of rank 16 (PEFT, in float32) adapt the baseline model of each seed to the Python manual in 400 steps, over a base
in bfloat16 and over the same base in nf4. Their states of `accuracy:baseline` must be in the same folder of states.

A training saves its state and its validation loss every 1000 steps, and continues from there when it is started again.
"""

from __future__ import annotations

import gzip
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from language_steps import INT4, INT8, RANK
from torch import Tensor, nn

import paredown as pare
from paredown.models.transformer import GPT, GPTConfig
from paredown.optim import AdamW

VOCABULARY = 8192
CORPORA = {"accuracy": "sotu_en", "lora_accuracy": "pydoc_en"}
VALIDATION_SHARE, NUM_VALIDATION = 0.05, 48  # of the tokens; batches
SAVE_EVERY = 1000
LORA_TARGETS = ["qkv", "project", "mlp.0", "mlp.2"]
TOKENS = "tokens.npz"
GPT_30M = GPTConfig(dim=512, num_layers=8, num_heads=8, vocabulary=VOCABULARY, context=256)


@dataclass(frozen=True)
class Setting:
    """The shape and the length of a training."""

    num_steps: int
    learning_rate: float
    size: int = 8
    length: int = 256
    config: GPTConfig = GPT_30M

    def rate(self, step: int) -> float:
        """Linear warm-up over the first 5 % of the steps, then a cosine to a tenth."""
        warm = max(self.num_steps // 20, 1)
        share = min(max(step - warm, 0) / max(self.num_steps - warm, 1), 1.0)
        return self.learning_rate * min((step + 1) / warm, 1.0) * (0.55 + 0.45 * math.cos(math.pi * share))


SETTINGS = {"accuracy": Setting(3000, 6e-4), "lora_accuracy": Setting(400, 1e-3)}
QUICK = GPTConfig(dim=64, num_layers=2, num_heads=2, vocabulary=VOCABULARY, context=32)


def activations(plan: pare.Plan, text: str) -> pare.Plan:
    """The plan with activations in a format, rounded stochastically under 8 bits."""
    return plan.set("activation", text, rounding="stochastic" if text == INT4 else None)


PLANS: dict[str, dict[str, Callable[[], pare.Plan | None]]] = {
    "accuracy": {
        "baseline": lambda: None,
        "lpmm+int4": lambda: activations(pare.Plan.preset("lpmm"), INT4),
        "half+int8": lambda: activations(pare.Plan.preset("half"), INT8),
        "checkpoints-int8+chunked": lambda: activations(pare.Plan.uniform(), INT8).recomputing("layers.*"),
    },
    "lora_accuracy": {"bf16": lambda: None, "nf4": lambda: pare.Plan.preset("frozen4")},
}
TRAININGS = {job: tuple(plans) for job, plans in PLANS.items()}  # job -> ways


# --- data -------------------------------------------------------------------------------------------------------------


def write_tokens(data: Path, to: Path) -> None:
    """Train a tokenizer on both corpora, and write their tokens to `to`, unless the file is there."""
    if to.exists():
        return
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = {name: gzip.decompress((data / "text" / f"{name}.txt.gz").read_bytes()).decode() for name in CORPORA.values()}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    lines = {name: text.splitlines(keepends=True) for name, text in texts.items()}
    tokenizer.train_from_iterator((line for part in lines.values() for line in part), trainer)
    encoded = {name: np.concatenate([one.ids for one in tokenizer.encode_batch(part)]) for name, part in lines.items()}
    to.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {name: ids.astype(np.uint16) for name, ids in encoded.items()}
    np.savez_compressed(to, **arrays)


@dataclass(frozen=True)
class Corpus:
    """Tokens on a device, and the pieces that a step sees."""

    train: Tensor
    validation: Tensor
    size: int
    length: int

    @staticmethod
    def read(path: Path | None, name: str, setting: Setting, device: str) -> Corpus:
        """The corpus of that name; random tokens without a file."""
        if path is None:
            ids = torch.randint(VOCABULARY, (20_000,), generator=torch.Generator().manual_seed(0))
        else:
            with np.load(path) as file:
                ids = torch.from_numpy(file[name].astype(np.int64))
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


@dataclass
class Training:
    """One run: a way and a seed."""

    job: str
    way: str
    seed: int
    device: str
    setting: Setting
    states: Path

    def path(self, job: str | None = None, way: str | None = None) -> Path:
        """The file of its state, or of that of another run of the same seed."""
        return self.states / f"{job or self.job}-{way or self.way}-{self.seed}.pt"

    def model(self) -> nn.Module:
        """A model at its start: random weights, or adapters over the trained baseline in bfloat16."""
        torch.manual_seed(self.seed)
        with torch.device(self.device):
            model = GPT(self.setting.config)
        if self.job == "accuracy":
            return model
        from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]

        base = self.path("accuracy", "baseline")
        if not base.exists():
            raise FileNotFoundError(f"{base} is missing: run the rows accuracy:baseline with the same folder of states first.")
        model.load_state_dict(torch.load(base, map_location=self.device)["model"])
        torch.manual_seed(self.seed)
        return get_peft_model(model.bfloat16(), LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LORA_TARGETS))  # type: ignore[arg-type]

    def optimizer(self, model: nn.Module, plan: pare.Plan | None) -> torch.optim.Optimizer:
        """AdamW: of paredown where the plan packs what it updates."""
        trained = [p for p in model.parameters() if p.requires_grad]
        options: dict[str, Any] = {"lr": self.setting.learning_rate, "betas": (0.9, 0.95), "weight_decay": 0.1}
        if plan is not None and self.way.startswith(("lpmm", "half")):
            return AdamW(trained, **options, seed=self.seed)
        return torch.optim.AdamW(trained, **options, fused=True)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean loss of a batch."""
        with torch.autocast(self.device, torch.bfloat16):
            return model(*batch).loss

    @torch.no_grad()
    def validation_loss(self, model: nn.Module, corpus: Corpus) -> float:
        """The mean loss on the validation split."""
        model.eval()
        found = torch.stack([self.loss(model, batch).float() for batch in corpus.validation_batches()])
        model.train()
        return float(found.mean())

    def run(self, corpus: Corpus) -> dict[str, Any]:
        """Train to the end from the last saved state; the fields of the row."""
        model, plan = self.model(), PLANS[self.job][self.way]()
        saved: dict[str, Any] = torch.load(self.path(), map_location=self.device) if self.path().exists() else {}
        if saved:
            model.load_state_dict(saved["model"])
        with ExitStack() as stack:
            session = None
            if plan is not None:
                chunked = "chunked" in self.way
                session = stack.enter_context(pare.apply(plan, model, seed=self.seed, chunked_loss=chunked))
            optimizer = self.optimizer(model, plan)
            if saved:
                optimizer.load_state_dict(saved["optimizer"])
            if saved and session is not None:
                session.load_state_dict(saved["session"])
            curve, seconds = saved.get("curve", {}), saved.get("seconds", 0.0)
            if not saved:
                curve[0] = self.validation_loss(model, corpus)
            for first in range(saved.get("step", 0), self.setting.num_steps, SAVE_EVERY):
                seconds += self.train(model, optimizer, corpus, range(first, min(first + SAVE_EVERY, self.setting.num_steps)))
                step = min(first + SAVE_EVERY, self.setting.num_steps)
                curve[step] = self.validation_loss(model, corpus)
                self.save({"step": step, "curve": curve, "seconds": seconds}, model, optimizer, session)
            changes = None if session is None else len(session.changes)
        last = curve[self.setting.num_steps]
        shape = [self.setting.size, self.setting.length]
        fields = {"validation_loss": last, "validation_losses": list(curve.items()), "num_steps": self.setting.num_steps}
        return {**fields, "shape": shape, "median_seconds": seconds / self.setting.num_steps, "num_changes": changes}

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, corpus: Corpus, steps: range) -> float:
        """Some steps; their seconds."""
        begun = time.perf_counter()
        for step in steps:
            for group in optimizer.param_groups:
                group["lr"] = self.setting.rate(step)
            loss = self.loss(model, corpus.batch(self.seed, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    def save(self, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, session: Any) -> None:
        """Write the state, at once: a run that is killed here leaves the last one."""
        self.states.mkdir(parents=True, exist_ok=True)
        part = self.path().with_suffix(".part")
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        more = {"session": session.state_dict()} if session is not None else {}
        torch.save({**state, "model": weights, "optimizer": optimizer.state_dict(), **more}, part)
        part.replace(self.path())


def training_fields(request: dict[str, Any]) -> dict[str, Any]:
    """The fields of one training's row."""
    setting = SETTINGS[request["job"]]
    if request["is_quick"]:
        setting = Setting(4, setting.learning_rate, 2, 32, QUICK)
    states = Path(request["states"])
    path = None if request["is_quick"] else states / TOKENS
    corpus = Corpus.read(path, CORPORA[request["job"]], setting, request["device"])
    return Training(request["job"], request["way"], request["seed"], request["device"], setting, states).run(corpus)
