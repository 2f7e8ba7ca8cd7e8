"""A fine-tune with Hugging Face's Trainer, all parameters trained.

Weights and optimizer state in the formats of a tier, activations in 8 bits, by one call of `attach`. Offline: GPT-2 from a config, on
sequences that count upwards. `python hugging_face.py --size full` is GPT-2 medium on a GPU.
"""

import argparse
import sys
from importlib.util import find_spec
from tempfile import TemporaryDirectory

import torch

import paredown as pare

if not (find_spec("transformers") and find_spec("accelerate")):
    sys.exit("Skipped: this example needs Transformers and Accelerate (pip install 'paredown[transformers]').")

from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from paredown.integrations.hugging_face import attach

SIZES = {
    "small": (128, 64, 128, 2, 4, 15),
    "full": (50257, 1024, 1024, 24, 16, 50),
}  # vocabulary, length, width, layers, heads, steps
parser = argparse.ArgumentParser()
parser.add_argument("--size", choices=SIZES, default="small")
parser.add_argument("--tier", default="safe", help="safe, half and fine_tune to fine-tune; lpmm and lpmm4 to train from the start")
options, _ = parser.parse_known_args()
vocabulary, length, width, num_layers, num_heads, num_steps = SIZES[options.size]
is_small = options.size == "small"
set_verbosity_error()
disable_progress_bar()
torch.set_num_threads(1)  # tensors are small
torch.manual_seed(0)

# %% A model and data without downloads; yours come by `from_pretrained`
shape = {"n_positions": length, "n_embd": width, "n_layer": num_layers, "n_head": num_heads}
model = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, use_cache=False, **shape))
begins = torch.randint(100, (256, 1), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row} for row in (begins + torch.arange(length)) % 128]

# %% A plan, and the peak before anything runs
plan = pare.Plan.preset(options.tier).set("activation", "int8/64@bf16")
batch = {name: torch.empty(8, length, dtype=torch.long) for name in ("input_ids", "labels")}
trace = pare.trace_step(model, batch, optimizer="adamw", device="cpu" if is_small else "cuda")
sizes = [pare.footprint(trace, p).peak_bytes / 2**20 for p in (None, plan)]
print(f"predicted peak: {sizes[0]:.1f} MiB of the baseline, {sizes[1]:.1f} MiB under the plan")

# %% The trainer; clipping, schedule, logging and checkpoints are its own
folder = TemporaryDirectory()
args = TrainingArguments(
    output_dir=folder.name, max_steps=num_steps, per_device_train_batch_size=8, learning_rate=1e-3, logging_steps=5,
    report_to=[], save_strategy="no", use_cpu=is_small, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model=model, args=args, train_dataset=data)
pared = attach(trainer, plan)
print(f"{len(pared.session.changes)} slots are not as the plan asked: small parameters stay wider")
trainer.remove_callback(PrinterCallback)  # the log is printed below
trainer.train()
for row in trainer.state.log_history[:-1]:
    print(f"step {row['step']}: loss {row['loss']:.3f}, optimizer {row['memory/optimizer_gib'] * 1024:.2f} MiB")

# %% The saved model has plain weights
trainer.save_model(folder.name)
read = GPT2LMHeadModel.from_pretrained(folder.name)
same = all(torch.equal(a, b.cpu()) for a, b in zip(read.parameters(), trainer.model.parameters(), strict=True))
print(f"from_pretrained gives {'the same weights' if same else 'OTHER WEIGHTS'}")
folder.cleanup()
