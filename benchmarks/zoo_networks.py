"""The zoo: networks of many kinds, each at full size for a GPU and at a small size for the CPU, with a batch of random numbers.

Every network takes keywords and returns its loss. Those of transformers are built from their configurations, with random weights; the
others are those of zoo_models.py and networks.py. Dropout is off, so that gradients can be compared.

    cnn          residual, depthwise, dense and normalizer-free networks, U-Nets of pictures and volumes, detection
    vision       transformers: plain, windowed, hierarchical, distilled
    language     decoders of several families, encoders, encoder-decoders, experts
    speech, diffusion, recurrent, state space, graph, points, table
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import networks
import torch
import zoo_models
from torch import Tensor, nn

Sizes = Mapping[str, Any]
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Network:
    """One network of the zoo; `build` and `batch` take True for the small size. `batch` makes its tensors on the CPU."""

    name: str
    kind: str
    build: Callable[[bool], nn.Module]
    batch: Callable[[bool], Batch]
    channels_last: bool = False

    def model(self, *, small: bool) -> nn.Module:
        """A network in training mode, without dropout."""
        model = self.build(small).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model.to(memory_format=torch.channels_last) if self.channels_last else model  # type: ignore[call-overload]


def moved(batch: Batch, device: str) -> Batch:
    """The batch on a device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


# --- batches --------------------------------------------------------------------------------------------------------------------------


Shapes = Mapping[str, tuple[int, ...]]


def random_batch(full: Shapes, small: Shapes, **limits: tuple[int, int]) -> Callable[[bool], Batch]:
    """A function that draws tensors of these shapes: normal numbers, or integers below a limit (full, small)."""

    def draw(is_small: bool) -> Batch:
        source = torch.Generator().manual_seed(0)
        found: Batch = {}
        for name, shape in (small if is_small else full).items():
            if name in limits:
                found[name] = torch.randint(limits[name][is_small], shape, generator=source)
            else:
                found[name] = torch.randn(shape, generator=source)
        return found

    return draw


def tokens(full: tuple[int, int], small: tuple[int, int], vocabulary: tuple[int, int]) -> Callable[[bool], Batch]:
    """Token ids that are their own labels."""
    draw = random_batch({"input_ids": full}, {"input_ids": small}, input_ids=vocabulary)
    return lambda is_small: {**(batch := draw(is_small)), "labels": batch["input_ids"]}


def images(size: int, side: int = 224, small_side: int = 32, name: str = "pixel_values") -> Callable[[bool], Batch]:
    """Pictures, one of ten classes each."""
    full, small = {name: (size, 3, side, side), "labels": (size,)}, {name: (4, 3, small_side, small_side), "labels": (4,)}
    return random_batch(full, small, labels=(10, 10))


def detected(is_small: bool) -> Batch:
    """Pictures alone: the targets of a detector are in `Detector`."""
    return random_batch({"pixel_values": (8, 3, 512, 512)}, {"pixel_values": (4, 3, 96, 96)})(is_small)


# --- networks of transformers -----------------------------------------------------------------------------------------------------------


def pretrained(name: str, full: Sizes, small: Sizes, **shared: Any) -> Callable[[bool], nn.Module]:
    """A function that builds the class `name` of transformers from its configuration, with random weights and without dropout."""

    def make(is_small: bool) -> nn.Module:
        import transformers

        kind = getattr(transformers, name)
        config = kind.config_class(**{**shared, **(small if is_small else full)})
        for key in vars(config):
            if key.endswith(("dropout", "dropout_prob", "dropout_rate", "_pdrop", "layerdrop", "drop_path_rate")):
                setattr(config, key, 0.0)
        return kind(config)

    return make


def decoder(name: str, full: Sizes, small: Sizes, size: tuple[int, int] = (4, 1024), **shared: Any) -> tuple[Any, Any]:
    """Builder and batch of a causal language model; sizes that are not given are those of a small model of its shape."""
    base_full = {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
    }
    base_small = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    full, small = {**base_full, **full}, {**base_small, **small}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return (
        pretrained(name, full, small, use_cache=False, **special, **shared),
        tokens(size, (2, 64), (full["vocab_size"], small["vocab_size"])),
    )


class Detector(nn.Module):
    """A detector of transformers with two boxes in each picture."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor) -> Any:
        """The loss of all boxes."""
        device = pixel_values.device
        boxes = torch.tensor([[0.3, 0.4, 0.2, 0.3], [0.6, 0.5, 0.4, 0.5]], device=device)
        targets = [{"class_labels": torch.tensor([1, 2], device=device), "boxes": boxes} for _ in range(len(pixel_values))]
        return self.network(pixel_values=pixel_values, labels=targets)


def yolos(is_small: bool) -> nn.Module:
    """A plain vision transformer that detects."""
    full = {"image_size": [512, 512], "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
    small = {"image_size": [96, 96], "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "num_hidden_layers": 2}
    small = {**small, "num_detection_tokens": 10}
    return Detector(pretrained("YolosForObjectDetection", full, small, num_labels=10)(is_small))


class WithLabels(nn.Module):
    """A classifier of transformers whose class with labels computes no loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor, labels: Tensor) -> networks.Answer:
        """The loss of the mean of both heads, and their logits."""
        return networks.answer(self.network(pixel_values).logits, labels)


def distilled(is_small: bool) -> nn.Module:
    """A vision transformer with a class token and a distillation token."""
    full, small = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}, SMALL_VIT
    network = pretrained("DeiTForImageClassificationWithTeacher", full, small, num_labels=10)(is_small)
    return WithLabels(network)


SMALL_VIT = {
    "image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
SMALL_EFFICIENT = {
    "in_channels": [32, 16], "out_channels": [16, 24], "kernel_sizes": [3, 5], "strides": [1, 2], "num_block_repeats": [1, 1],
    "expand_ratios": [1, 6], "depthwise_padding": [], "hidden_dim": 1280, "width_coefficient": 1.0, "depth_coefficient": 1.0,
}  # fmt: skip
FULL_EFFICIENT = {"hidden_dim": 1280, "width_coefficient": 1.0, "depth_coefficient": 1.0, "image_size": 224}  # B0
SMALL_SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
SMALL_STAGES = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}
SMALL_SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2],
    "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 32,
}  # fmt: skip
SMALL_SPEECH = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "conv_dim": [32, 32],
    "conv_stride": [5, 4], "conv_kernel": [10, 5],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
SMALL_WHISPER = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 256,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 64, "max_target_positions": 64, "num_mel_bins": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
SMALL_T5 = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
SMALL_BERT = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
SMALL_SSM = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "state_size": 8,
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 1,
}
NO_MASKS = {"mask_time_prob": 0.0, "mask_feature_prob": 0.0, "apply_spec_augment": False}


# --- the table --------------------------------------------------------------------------------------------------------------------------


def own(kind: Callable[..., nn.Module], small: Sizes, full: Sizes | None = None) -> Callable[[bool], nn.Module]:
    """A function that builds a network from keywords."""
    return lambda is_small: kind(**(small if is_small else full or {}))


def classifier(kind: Callable[..., nn.Module], small: Sizes) -> Callable[[bool], nn.Module]:
    """The same, with a cross entropy."""
    return lambda is_small: zoo_models.Classifier(kind(**({**small, "num_classes": 10} if is_small else {})))


def unet(is_small: bool) -> nn.Module:
    """A U-Net of pictures with attention, which predicts classes of pixels."""
    return zoo_models.Classifier(PerPixel(networks.AttentionUNet(16 if is_small else 64)))


class PerPixel(nn.Module):
    """A network with the classes of each pixel last."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """(batch, height, columns, classes)."""
        return self.network(x).permute(0, 2, 3, 1)


def graph_batch(is_small: bool) -> Batch:
    """Nodes, edges between them, a class for each node."""
    nodes, edges = (256, 2048) if is_small else (40_000, 400_000)
    shapes = {"nodes": (nodes, 64), "edges": (2, edges), "labels": (nodes,)}
    return random_batch(shapes, shapes, edges=(nodes, nodes), labels=(10, 10))(is_small)


def diffusion_batch(size: int, channels: int, side: int, **more: tuple[int, ...]) -> Callable[[bool], Batch]:
    """Noisy pictures, times and noise; `more`: shapes without the batch, at full size, the small ones have an eighth of each."""

    def shapes(count: int, width: int, divisor: int) -> dict[str, tuple[int, ...]]:
        rest = {name: (count, *(math.ceil(n / divisor) for n in shape)) for name, shape in more.items()}
        return {"x": (count, channels, width, width), "times": (count, 256), "noise": (count, channels, width, width), **rest}

    return random_batch(shapes(size, side, 1), shapes(4, 16, 8), classes=(1000, 1000))


LANGUAGE = {
    "llama": decoder("LlamaForCausalLM", {"num_key_value_heads": 4}, {"num_key_value_heads": 2}),
    "qwen3": decoder("Qwen3ForCausalLM", {"num_key_value_heads": 8, "head_dim": 128}, {"num_key_value_heads": 2, "head_dim": 16}),
    "gemma2": decoder(
        "Gemma2ForCausalLM", {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 64000, "num_hidden_layers": 8},
        {"num_key_value_heads": 2, "head_dim": 16}, attn_implementation="eager",
    ),
    "gpt_neox": decoder("GPTNeoXForCausalLM", {}, {}),
    "phi3": decoder("Phi3ForCausalLM", {}, {}),
    "olmo2": decoder("Olmo2ForCausalLM", {}, {}),
    "mixtral": decoder(
        "MixtralForCausalLM", {"num_local_experts": 8, "num_hidden_layers": 6, "intermediate_size": 1024, "num_key_value_heads": 4},
        {"num_local_experts": 4, "num_key_value_heads": 2},
    ),
    "qwen3_moe": decoder(
        "Qwen3MoeForCausalLM",
        {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "num_hidden_layers": 6, "num_key_value_heads": 4},
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 16},
    ),
}  # fmt: skip

TABLE = (
    Network("efficientnet_b0", "cnn", pretrained("EfficientNetForImageClassification", FULL_EFFICIENT, SMALL_EFFICIENT, num_labels=10),
            images(128), channels_last=True),
    Network("regnet", "cnn", pretrained("RegNetForImageClassification", {"groups_width": 56, "hidden_sizes": [224, 448, 896, 2240],
            "depths": [2, 5, 11, 1]}, {**SMALL_STAGES, "groups_width": 8}, num_labels=10), images(64), channels_last=True),
    Network("mobilenet_v2", "cnn", pretrained("MobileNetV2ForImageClassification", {}, {"depth_multiplier": 0.25, "image_size": 32},
            num_labels=10), images(128), channels_last=True),
    Network("convnext", "cnn", pretrained("ConvNextForImageClassification", {},
            {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
            num_labels=10), images(64)),
    Network("densenet", "cnn", classifier(zoo_models.DenseNet, {"depths": (2, 2), "growth": 8}), images(64, name="x"), channels_last=True),
    Network("norm_free", "cnn", classifier(zoo_models.NormFreeNet, {"widths": (32, 64), "depths": (1, 2)}), images(128, name="x"),
            channels_last=True),
    Network("unet_2d", "cnn", unet, random_batch({"x": (16, 3, 128, 128), "labels": (16, 128, 128)},
            {"x": (2, 3, 16, 16), "labels": (2, 16, 16)}, labels=(3, 3))),
    Network("unet_3d", "cnn", own(zoo_models.VolumeUNet, {"widths": (8, 16, 16)}), random_batch({"x": (2, 1, 128, 128, 128),
            "labels": (2, 128, 128, 128)}, {"x": (2, 1, 16, 16, 16), "labels": (2, 16, 16, 16)}, labels=(3, 3))),
    Network("detector", "cnn", yolos, detected),
    Network("vit", "vision", pretrained("ViTForImageClassification", {}, SMALL_VIT, num_labels=10), images(64)),
    Network("swin", "vision", pretrained("SwinForImageClassification", {}, SMALL_SWIN, num_labels=10), images(64)),
    Network("segformer", "vision", pretrained("SegformerForImageClassification", {}, SMALL_SEGFORMER, num_labels=10), images(64)),
    Network("distilled_vit", "vision", distilled, images(64)),
    *(Network(name, "language", *parts) for name, parts in LANGUAGE.items()),
    Network("bert", "language", pretrained("BertForMaskedLM", {}, SMALL_BERT), tokens((32, 512), (2, 64), (30522, 256))),
    Network("modernbert", "language", pretrained("ModernBertForMaskedLM", {"reference_compile": False}, {**SMALL_BERT, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "reference_compile": False},
            attn_implementation="sdpa"),
            tokens((16, 512), (2, 64), (50368, 256))),
    Network("t5", "language", pretrained("T5ForConditionalGeneration", {}, SMALL_T5, use_cache=False, decoder_start_token_id=0),
            tokens((16, 512), (2, 32), (32128, 256))),
    Network("experts", "language", own(zoo_models.ExpertLanguageModel, {"width": 64, "num_layers": 2, "num_heads": 4, "num_experts": 4,
            "vocabulary": 256}), tokens((8, 1024), (2, 64), (16384, 256))),
    Network("whisper", "speech", pretrained("WhisperForConditionalGeneration", {"max_source_positions": 750, "d_model": 512,
            "encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048,
            "encoder_layers": 6, "decoder_layers": 6}, SMALL_WHISPER, **NO_MASKS, use_cache=False),
            random_batch({"input_features": (16, 80, 1500), "labels": (16, 256)}, {"input_features": (2, 16, 128), "labels": (2, 32)},
            labels=(50000, 256))),
    Network("wav2vec2", "speech", pretrained("Wav2Vec2ForCTC", {}, SMALL_SPEECH, **NO_MASKS, vocab_size=32),
            random_batch({"input_values": (8, 80_000), "labels": (8, 64)}, {"input_values": (2, 4000), "labels": (2, 8)}, labels=(31, 31))),
    Network("dit", "diffusion", own(zoo_models.DiffusionTransformer, {"width": 64, "num_layers": 2, "num_heads": 4, "side": 16}),
            diffusion_batch(64, 4, 32, classes=())),
    Network("two_stream_dit", "diffusion", own(zoo_models.TwoStreamDiffusion, {"width": 64, "num_layers": 2, "num_heads": 4, "text": 128}),
            diffusion_batch(16, 16, 64, texts=(128, 1024))),
    Network("cross_attention_unet", "diffusion", own(zoo_models.CrossAttentionUNet, {"widths": (16, 32, 64), "text": 96}),
            diffusion_batch(16, 4, 64, texts=(77, 768))),
    Network("lstm", "recurrent", own(networks.LstmLanguageModel, {"width": 64, "vocabulary": 256}),
            tokens((64, 256), (4, 32), (16384, 256))),
    Network("selective_scan", "state space", own(networks.ScanLanguageModel, {"width": 64, "num_layers": 2, "num_heads": 4, "num_states": 8,
            "vocabulary": 256}), tokens((4, 1024), (2, 128), (32000, 256))),
    Network("mamba2", "state space", pretrained("Mamba2ForCausalLM", {"hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 32000,
            "num_heads": 24, "n_groups": 1}, SMALL_SSM, use_cache=False, chunk_size=64), tokens((4, 512), (2, 64), (32000, 256))),
    Network("graph", "graph", own(networks.GraphNetwork, {"width": 32, "num_layers": 2}), graph_batch),
    Network("pointnet", "points", classifier(zoo_models.PointNet, {"widths": (16, 64)}), random_batch({"x": (64, 3, 4096), "labels": (64,)},
            {"x": (4, 3, 256), "labels": (4,)}, labels=(10, 10))),
    Network("tabular", "table", own(zoo_models.TabularNet, {"width": 64, "num_layers": 2}), random_batch({"x": (16384, 64),
            "categories": (16384, 16), "labels": (16384,)}, {"x": (256, 64), "categories": (256, 16), "labels": (256,)},
            categories=(100, 100))),
)  # fmt: skip
ZOO = {network.name: network for network in TABLE}
