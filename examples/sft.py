"""A LoRA fine-tune with TRL's SFTTrainer within a memory budget; offline, a tiny Llama and a tokenizer of 64 words."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from importlib.util import find_spec
from tempfile import TemporaryDirectory

import torch

if not (find_spec("trl") and find_spec("peft")):
    sys.exit("This example needs TRL and PEFT: pip install 'paredown[trl]'.")

import datasets
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import set_verbosity_error
from trl import SFTConfig, SFTTrainer

from paredown.integrations.hugging_face import attach

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]


def llama() -> LlamaForCausalLM:
    """Random weights from a config, or from_pretrained(...)."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(config)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def main() -> None:
    """Fine-tune within the budget, print the plan and what the trainer logged, load the adapters with PEFT alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--budget", default="90%", help="bytes, such as 24GiB, or a share of the peak of the unmodified step")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of the libraries
    set_verbosity_error()
    logging.getLogger("paredown").setLevel(logging.ERROR)  # what attach decides is printed below
    datasets.disable_progress_bars()
    torch.set_num_threads(1)  # tensors are small
    rows = [" ".join(WORDS[3 + (start + i) % 61] for i in range(24)) for start in range(64)]  # they count upwards

    with TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, max_steps=options.steps, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-2,
            logging_steps=5, report_to=[], save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True,
        )  # fmt: skip
        trainer = SFTTrainer(
            llama(), args=args, train_dataset=datasets.Dataset.from_dict({"text": rows}), processing_class=tokenizer(),
            peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        )  # fmt: skip
        pared = attach(trainer, budget=options.budget)  # the one line: makes a plan for the trainer's own step, and applies it
        print(f"plan: {pared.plan.reason}")
        trainer.train()
        for row in trainer.state.log_history[:-1]:
            print(f"step {row['step']}: loss {row['loss']:.3f}, weights {row['memory/weight_gib'] * 1024:.2f} MiB")
        trainer.save_model(folder)
        read = PeftModel.from_pretrained(llama(), folder)  # plain adapters
        saved = dict(trainer.model.named_parameters())
        same = all(torch.equal(p, saved[name]) for name, p in read.named_parameters() if "lora" in name)
        print(f"PEFT alone loads {'the same adapters' if same else 'OTHER ADAPTERS'}")


if __name__ == "__main__":
    main()
