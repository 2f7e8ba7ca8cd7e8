"""A Hugging Face fine-tune with Trainer, optimizer state and weights in few bits; offline, a tiny model from a config."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from tempfile import TemporaryDirectory

import torch

import paredown as pare

if not (find_spec("transformers") and find_spec("accelerate")):
    sys.exit("This example needs Transformers and Accelerate: pip install 'paredown[transformers]'.")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from paredown.integrations.hugging_face import attach


def tokens(num: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards: something to learn without a download."""
    begins = torch.randint(100, (num, 1), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in (begins + torch.arange(64)) % 128]


def main() -> None:
    """Fine-tune, print what the trainer logged, read the saved model back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument(
        "--tier", default="safe", help="safe and half are for fine-tuning; lpmm and lpmm4 for training from the start"
    )
    options = parser.parse_args()
    set_verbosity_error()
    disable_progress_bar()
    torch.set_num_threads(1)  # tensors are small
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_positions=64, n_embd=128, n_layer=2, n_head=4, use_cache=False)  # or from_pretrained(...)
    model = GPT2LMHeadModel(config)

    # A plan: what the optimizer keeps in `tier`, activations in 8 bits.
    plan = pare.Plan.preset(options.tier).set("activation", "int8/64@bf16")
    batch = {name: torch.empty(8, 64, dtype=torch.long) for name in ("input_ids", "labels")}
    trace = pare.trace_step(model, batch, optimizer="adamw", device="cpu")
    sizes = [pare.footprint(trace, p).peak_bytes / 2**20 for p in (None, plan)]
    print(f"predicted peak: {sizes[0]:.1f} MiB of the baseline, {sizes[1]:.1f} MiB under the plan")

    with TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, max_steps=options.steps, per_device_train_batch_size=8, learning_rate=1e-3, logging_steps=5,
            report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=args, train_dataset=tokens(256))
        pared = attach(trainer, plan)  # the one line; clipping, schedule, logging and checkpoints are the trainer's
        changes = pared.session.changes
        trainer.train()
        print(f"{len(changes)} slots are not as the plan asked: small parameters stay wider")
        for row in trainer.state.log_history[:-1]:
            print(f"step {row['step']}: loss {row['loss']:.3f}, optimizer {row['memory/optimizer_gib'] * 1024:.2f} MiB")
        trainer.save_model(folder)
        read = GPT2LMHeadModel.from_pretrained(folder)  # plain weights
        same = all(torch.equal(a, b) for a, b in zip(read.parameters(), trainer.model.parameters(), strict=True))
        print(f"from_pretrained gives {'the same weights' if same else 'OTHER WEIGHTS'}")


if __name__ == "__main__":
    main()
