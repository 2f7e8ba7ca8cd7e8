"""A LoRA fine-tune with TRL's SFTTrainer, within a memory budget.

`attach` traces the trainer's own step and makes the plan: the frozen base in few bits, activations packed. Offline: a tiny Llama and a
tokenizer of 64 words. `python sft.py --size full` has the shapes of a Llama of 8B parameters in bfloat16 on a GPU of 24 GB.
"""

import argparse
import logging
import sys
import warnings
from importlib.util import find_spec
from tempfile import TemporaryDirectory

import torch

if not (find_spec("trl") and find_spec("peft")):
    sys.exit("Skipped: this example needs TRL and PEFT (pip install 'paredown[trl]').")

import datasets
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from transformers.utils.logging import set_verbosity_error
from trl import SFTConfig, SFTTrainer

from paredown.integrations.hugging_face import attach

SMALL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4}
FULL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SIZES = {"small": (SMALL, 24, 10, "90%"), "full": (FULL, 2048, 50, "20GiB")}  # shape, words of a text, steps, budget
parser = argparse.ArgumentParser()
parser.add_argument("--size", choices=SIZES, default="small")
parser.add_argument("--budget", help="bytes, such as 24GiB, or a share of the peak of the unmodified step")
options, _ = parser.parse_known_args()
shape, length, num_steps, budget = SIZES[options.size]
is_small = options.size == "small"
warnings.simplefilter("ignore")  # of the libraries
set_verbosity_error()
logging.getLogger("paredown").setLevel(logging.ERROR)  # what attach decides is printed below
datasets.disable_progress_bars()
torch.set_num_threads(1)  # tensors are small

# %% A model and a tokenizer without downloads; yours come by `from_pretrained`
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]


def llama() -> LlamaForCausalLM:
    """Random weights from a config, or from_pretrained(...)."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).to(torch.float32 if is_small else torch.bfloat16)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


# %% The trainer is TRL's; `attach` is the one line
rows = [" ".join(WORDS[3 + (start + i) % 61] for i in range(length)) for start in range(64)]  # they count upwards
folder = TemporaryDirectory()
args = SFTConfig(
    folder.name, max_steps=num_steps, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-2,
    logging_steps=5, report_to=[], save_strategy="no", use_cpu=is_small, bf16=not is_small, disable_tqdm=True,
)  # fmt: skip
trainer = SFTTrainer(
    llama(), args=args, train_dataset=datasets.Dataset.from_dict({"text": rows}), processing_class=tokenizer(),
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)  # fmt: skip
pared = attach(trainer, budget=options.budget or budget)
trainer.remove_callback(PrinterCallback)  # the log is printed below
print(f"plan: {pared.plan.reason}")
trainer.train()
for row in trainer.state.log_history[:-1]:
    print(f"step {row['step']}: loss {row['loss']:.3f}, weights {row['memory/weight_gib'] * 1024:.2f} MiB")

# %% PEFT alone loads the adapters
trainer.save_model(folder.name)
read = PeftModel.from_pretrained(llama(), folder.name)
saved = dict(trainer.model.named_parameters())
same = all(torch.equal(p.cpu(), saved[name].cpu()) for name, p in read.named_parameters() if "lora" in name)
print(f"PEFT alone loads {'the same adapters' if same else 'OTHER ADAPTERS'}")
folder.cleanup()
