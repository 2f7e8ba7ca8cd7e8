"""Small programs that use the logits of a language model in every way that we know of: as a table, for sessions whose loss is in chunks.

Each program takes a model and token ids, makes its own losses and backward passes, and returns values. `outcome` runs one and adds the
gradients of the parameters that the model had at first. Plain torch is what a session is compared with.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils._pytree import tree_leaves

NUM_CLASSES, SIZE = 8192, 4
Use = Callable[["Model", Tensor], Any]


class Model(nn.Module):
    """An embedding, a layer and a head with a bias; counts are 15 tokens, 8192 classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = nn.Embedding(64, SIZE), nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(SIZE, NUM_CLASSES)

    def hidden(self, ids: Tensor) -> Tensor:
        """The input of the head."""
        return self.layer(self.embedding(ids)).tanh()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))


def batch() -> Tensor:
    """Token ids, 3 x 5."""
    return torch.randint(64, (3, 5), generator=torch.Generator().manual_seed(1))


def loss_of(logits: Tensor, ids: Tensor, **options: Any) -> Tensor:
    """The cross entropy of logits in a form that stays in chunks."""
    return functional.cross_entropy(logits.flatten(0, -2), ids.flatten(), **options)


@dataclass(frozen=True)
class Outcome:
    """What a program returned, and the gradient of each parameter or None."""

    values: list[Any]
    gradients: dict[str, Tensor | None]


def outcome(use: Use, model: Model) -> Outcome:
    """Run a program; the parameters are those of the model before it."""
    before = dict(model.named_parameters())
    values = use(model, batch())
    leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(values)]
    after = {f"{name}, afterwards": p for name, p in model.named_parameters()}
    grads = {name: None if p.grad is None else p.grad.detach().clone() for name, p in (before | after).items()}
    return Outcome(leaves, grads)


USES: dict[str, Use] = {}
REFUSED: dict[str, str] = {}  # programs that a session refuses: what the error, or the warning, says
TRANSFORMS: dict[str, Use] = {}


def use(function: Use) -> Use:
    """Add a program to the table."""
    USES[function.__name__.replace("_", " ").strip()] = function
    return function


def functional_transform(function: Use) -> Use:
    """Add a program that sessions refuse to run, since nothing can be packed in it: for models without a session."""
    TRANSFORMS[function.__name__.replace("_", " ")] = function
    return function


def refused(says: str) -> Callable[[Use], Use]:
    """Add a program that a session refuses by a RuntimeError."""

    def add(function: Use) -> Use:
        REFUSED[function.__name__.replace("_", " ").strip()] = says
        return use(function)

    return add


# --- losses ---------------------------------------------------------------------------------------------------------------------------


@use
def plain_mean(model: Model, ids: Tensor) -> Any:
    (loss := loss_of(model(ids), ids)).backward()
    return loss


@use
def sum_of_rows(model: Model, ids: Tensor) -> Any:
    (loss := loss_of(model(ids), ids, reduction="sum")).backward()
    return loss


@use
def one_loss_per_row(model: Model, ids: Tensor) -> Any:
    losses = loss_of(model(ids), ids, reduction="none")
    (losses * torch.linspace(0, 1, 15)).sum().backward()
    return losses


@use
def ignored_rows(model: Model, ids: Tensor) -> Any:
    (loss := loss_of(model(ids), torch.where(ids < 30, -100, ids))).backward()
    return loss


@use
def another_ignored_class(model: Model, ids: Tensor) -> Any:
    (loss := loss_of(model(ids), ids, ignore_index=int(ids[0, 0]))).backward()
    return loss


@use
def class_weights_and_smoothing(model: Model, ids: Tensor) -> Any:
    (loss := loss_of(model(ids), ids, weight=torch.linspace(0.5, 2, NUM_CLASSES), label_smoothing=0.2)).backward()
    return loss


@use
def class_weights_that_learn(model: Model, ids: Tensor) -> Any:
    weights = torch.linspace(0.5, 2, NUM_CLASSES).log().requires_grad_()
    loss = loss_of(model(ids), ids, weight=weights.exp().detach())
    loss.backward()
    return loss, weights.grad


@use
def probabilities_as_target(model: Model, ids: Tensor) -> Any:
    target = functional.one_hot(ids, NUM_CLASSES).flatten(0, 1).float()
    (loss := functional.cross_entropy(model(ids).flatten(0, 1), target)).backward()
    return loss


@use
def old_reduction_arguments(model: Model, ids: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), size_average=False)
    loss.backward()
    return loss


@use
def two_losses_of_one_tensor(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    first, second = loss_of(logits, ids), loss_of(logits[:, :-1], ids[:, 1:], reduction="sum")
    (first + 0.1 * second).backward()
    return first, second


@use
def losses_backward_one_by_one(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    first, second = loss_of(logits, ids), loss_of(logits[:, :-1], ids[:, 1:])
    first.backward(retain_graph=True)
    second.backward()
    return first, second


@use
def backward_twice(model: Model, ids: Tensor) -> Any:
    loss = loss_of(model(ids), ids)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


@use
def loss_and_z_loss(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    loss = loss_of(logits, ids) + 1e-2 * logits.logsumexp(-1).square().mean()
    loss.backward()
    return loss


@use
def z_loss_before_the_loss(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    z_loss = 1e-2 * torch.logsumexp(logits, -1).square().mean()
    (loss := z_loss + loss_of(logits, ids)).backward()
    return loss


@use
def negative_log_likelihood(model: Model, ids: Tensor) -> Any:
    loss = functional.nll_loss(functional.log_softmax(model(ids).flatten(0, 1), -1), ids.flatten())
    loss.backward()
    return loss


@use
def distillation(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    with torch.no_grad():
        teacher = model(ids.flip(0))
    loss = loss_of(logits, ids) + functional.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
    loss.backward()
    return loss


@use
def soft_capped(model: Model, ids: Tensor) -> Any:
    (loss := loss_of(torch.tanh(model(ids) / 3.0) * 3.0, ids)).backward()
    return loss


@use
def classes_in_dimension_one(model: Model, ids: Tensor) -> Any:
    (loss := functional.cross_entropy(model(ids).transpose(1, 2), ids)).backward()
    return loss


@use
def in_float64(model: Model, ids: Tensor) -> Any:
    (loss := loss_of(model(ids).double(), ids)).backward()
    return loss


@use
def loss_without_gradients(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    with torch.no_grad():
        value = loss_of(logits, ids)
    loss_of(logits, ids).backward()
    return value, value.requires_grad


@use
def loss_in_inference_mode(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    with torch.inference_mode():
        value = loss_of(logits, ids).item()
    loss_of(logits, ids).backward()
    return value


@use
def loss_of_rows_by_a_mask(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    (loss := functional.cross_entropy(logits[ids > 20], ids[ids > 20])).backward()
    return loss


# --- metrics --------------------------------------------------------------------------------------------------------------------------


@use
def accuracy_before_the_loss(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == ids).float().mean()
    (loss := loss_of(logits, ids)).backward()
    return loss, accuracy


@use
def top_classes_after_the_loss(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    (loss := loss_of(logits, ids)).backward()
    return loss, logits.topk(3).values, torch.argmax(logits, -1), logits[0, 0].max()


@use
def numbers_of_logits(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    found = logits[0, 0, :3].tolist(), logits[1, 1, 1].item(), logits.sum().item(), bool((logits > 0).any())
    (loss := loss_of(logits, ids)).backward()
    return loss, found


@use
def copies_of_logits(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    buffer = io.BytesIO()
    torch.save(logits, buffer)
    buffer.seek(0)
    found = torch.load(buffer), logits.clone().mul_(2), logits.detach().clone().zero_()
    (loss := loss_of(logits, ids)).backward()
    return loss, found


@use
def pickled_logits(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    (loss := loss_of(logits, ids)).backward()
    return loss, pickle.loads(pickle.dumps(logits.detach())), copy.deepcopy(logits.detach())


@use
def logits_in_a_list(model: Model, ids: Tensor) -> Any:
    held = [model(part[None]) for part in ids]
    losses = [loss_of(logits, part) for logits, part in zip(held, ids, strict=True)]
    sum(losses, torch.zeros(())).backward()
    return losses, held[0] is held[1], held[0] is held[0], len(set(held))


# --- two tensors of logits ------------------------------------------------------------------------------------------------------------


@use
def sum_of_two_passes(model: Model, ids: Tensor) -> Any:
    (loss := loss_of(model(ids) + model(ids.flip(0)), ids)).backward()
    return loss


@use
def sum_with_a_scale(model: Model, ids: Tensor) -> Any:
    (loss := loss_of(torch.add(model(ids), 0.5 * model(ids.flip(0))), ids)).backward()
    return loss


@use
def sum_with_alpha(model: Model, ids: Tensor) -> Any:
    (loss := loss_of(torch.add(model(ids), model(ids.flip(0)), alpha=0.5), ids)).backward()
    return loss


@use
def sum_of_one_tensor_with_itself(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    (loss := loss_of(logits + logits, ids)).backward()
    return loss


@use
def sum_in_place(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    logits += model(ids.flip(0))
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def sum_of_three_passes(model: Model, ids: Tensor) -> Any:
    (loss := loss_of(model(ids) + model(ids.flip(0)) + model(ids.flip(1)), ids)).backward()
    return loss


@use
def difference_of_two_passes(model: Model, ids: Tensor) -> Any:
    (loss := loss_of(model(ids) - model(ids.flip(0)), ids)).backward()
    return loss


@use
def product_of_two_passes(model: Model, ids: Tensor) -> Any:
    (loss := loss_of(model(ids) * model(ids.flip(0)), ids)).backward()
    return loss


@use
def mean_of_two_passes(model: Model, ids: Tensor) -> Any:
    (loss := loss_of((model(ids) + model(ids.flip(0))) / 2, ids)).backward()
    return loss


@use
def two_passes_joined(model: Model, ids: Tensor) -> Any:
    logits = torch.cat([model(ids[:1]), model(ids[1:])])
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def two_passes_stacked(model: Model, ids: Tensor) -> Any:
    (loss := loss_of(torch.stack([model(ids), model(ids.flip(0))]).mean(0), ids)).backward()
    return loss


@use
def contrast_of_two_passes(model: Model, ids: Tensor) -> Any:
    loss = loss_of(model(ids), ids) - 0.5 * loss_of(model(ids.flip(0)), ids)
    loss.backward()
    return loss


@use
def logits_as_a_target(model: Model, ids: Tensor) -> Any:
    logits, other = model(ids).flatten(0, 1), model(ids.flip(0)).flatten(0, 1)
    (loss := functional.cross_entropy(logits, other.softmax(-1))).backward()
    return loss


# --- writes to the logits -------------------------------------------------------------------------------------------------------------


@use
def written_through_data(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    logits.data.mul_(3.0)
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def written_through_detach(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    logits.detach()[..., :100] = -5.0
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def written_through_a_view_of_detach(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    rows = logits.view(-1, NUM_CLASSES)
    rows.detach().add_(torch.linspace(0, 1, NUM_CLASSES))
    (loss := loss_of(logits, ids)).backward()
    return loss, rows


@use
def written_through_numpy(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    logits.detach().numpy()[:] += 1.5 * (torch.arange(NUM_CLASSES) % 2).numpy()
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def written_through_dlpack(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    torch.from_dlpack(logits.detach())[0] = 0.0
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def written_through_its_storage(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    torch.empty(0).set_(logits.untyped_storage())[:NUM_CLASSES] = 2.0
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def written_without_gradients(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    with torch.no_grad():
        logits[..., :4000] -= 1.0
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def written_through_a_view_without_gradients(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    with torch.no_grad():
        first = logits[0]
    with torch.no_grad():
        first[:, :1000] = 4.0
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def masked_in_place(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    logits[..., 100:] = float("-inf")
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def in_place_on_a_slice(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    logits[1].mul_(0.5)
    logits[:, 0].clamp_(max=0.1)
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def in_place_function(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    functional.leaky_relu(logits, 0.1, True)
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def written_after_a_copy(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    wide = logits.double()
    functional.relu(logits, inplace=True)
    (loss := loss_of(logits, ids) + loss_of(wide, ids)).backward()
    return loss


@use
def in_place_list_function(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    with torch.no_grad():
        torch._foreach_mul_([logits], 0.5)  # pyright: ignore
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def result_of_a_function(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    with torch.no_grad():
        torch.mul(logits, 2.0, out=logits)
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def data_replaced(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    logits.data = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def written_after_the_loss(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    loss = loss_of(logits, ids)
    logits.data.zero_()
    loss.backward()
    return loss, logits


@use
def detached_loss(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    loss, other = loss_of(logits.detach(), ids), loss_of(logits, ids)
    other.backward()
    return loss, loss.requires_grad


# --- gradients of the logits ----------------------------------------------------------------------------------------------------------


@use
def hook_before_the_loss(model: Model, ids: Tensor) -> Any:
    logits, seen = model(ids), list[Tensor]()
    logits.register_hook(lambda grad: seen.append(grad) or grad * 2)
    (loss := loss_of(logits, ids)).backward()
    return loss, seen


@use
def retained_before_the_loss(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    logits.retain_grad()
    (loss := loss_of(logits, ids)).backward()
    return loss, logits.grad


@use
def retained_view(model: Model, ids: Tensor) -> Any:
    rows = model(ids).flatten(0, 1)
    rows.retain_grad()
    (loss := functional.cross_entropy(rows, ids.flatten())).backward()
    return loss, rows.grad


@refused("before the loss")
def hook_after_the_loss(model: Model, ids: Tensor) -> Any:
    logits, seen = model(ids), list[Tensor]()
    loss = loss_of(logits, ids)
    logits.register_hook(lambda grad: seen.append(grad) or grad * 2)
    loss.backward()
    return loss, seen


@refused("before the loss")
def retained_after_the_loss(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    rows = logits.flatten(0, 1)
    loss = functional.cross_entropy(rows, ids.flatten())
    rows.retain_grad()
    loss.backward()
    return loss, rows.grad


@use
def hook_after_a_loss_of_all_logits(model: Model, ids: Tensor) -> Any:
    logits, seen = model(ids), list[Tensor]()
    loss = logits.log_softmax(-1).square().mean()
    logits.register_hook(lambda grad: seen.append(grad) or grad * 2)
    loss.backward()
    return loss, seen


@refused("before the loss")
def gradient_of_the_logits(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    loss = loss_of(logits, ids)
    return torch.autograd.grad(loss, [logits])


@refused("before the loss")
def gradient_that_may_be_unused(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    loss = loss_of(logits, ids)
    return torch.autograd.grad(loss, [model.head.weight, logits], allow_unused=True)


@refused("before the loss")
def backward_into_the_logits(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    loss_of(logits, ids).backward(inputs=[logits])
    return logits.grad


@use
def gradient_of_logits_of_another_function(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    (grad,) = torch.autograd.grad(logits.square().mean(), [logits])
    return grad


@use
def backward_from_the_logits(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    logits.backward(torch.linspace(0, 1, logits.numel()).view(logits.shape))
    return logits


@use
def gradients_by_autograd(model: Model, ids: Tensor) -> Any:
    loss = loss_of(model(ids), ids)
    return loss, torch.autograd.grad(loss, [*model.parameters()])


@use
def backward_into_some_parameters(model: Model, ids: Tensor) -> Any:
    (loss := loss_of(model(ids), ids)).backward(inputs=[model.head.bias, model.layer.weight])
    return loss


@refused("no second derivative")
def second_derivative(model: Model, ids: Tensor) -> Any:
    loss = loss_of(model(ids), ids)
    (grad,) = torch.autograd.grad(loss, [model.head.weight], create_graph=True)
    grad.square().sum().backward()
    return loss


@use
def second_derivative_of_all_logits(model: Model, ids: Tensor) -> Any:
    loss = model(ids).log_softmax(-1).square().mean()
    (grad,) = torch.autograd.grad(loss, [model.head.weight], create_graph=True)
    grad.square().sum().backward()
    return loss


class Square(torch.autograd.Function):
    """A function of autograd, whose call is not seen by `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (logits,) = ctx.saved_tensors
        return grad * 2 * logits / logits.numel()


@use
def own_function_of_autograd(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    (loss := loss_of(logits, ids) + Square.apply(logits.view(-1, NUM_CLASSES) / 2)).backward()  # type: ignore[operator]
    return loss


# --- other weights --------------------------------------------------------------------------------------------------------------------


def others(model: Model, *, requires_grad: bool = True) -> dict[str, Tensor]:
    """Other values for all parameters."""
    return {name: (p.detach() * 0.5 + 0.1).requires_grad_(requires_grad) for name, p in model.named_parameters()}


@use
def functional_call_with_other_weights(model: Model, ids: Tensor) -> Any:
    weights = others(model)
    logits: Any = functional_call(model, weights, (ids,))
    (loss := loss_of(logits, ids)).backward()
    return loss, [w.grad for w in weights.values()]


@use
def functional_call_of_the_loss_too(model: Model, ids: Tensor) -> Any:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            return loss_of(self.model(ids), ids)

    weights = {f"model.{name}": w for name, w in others(model).items()}
    loss: Any = functional_call(Whole(), weights, (ids,))
    loss.backward()
    return loss, [w.grad for w in weights.values()]


@use
def functional_call_with_constants(model: Model, ids: Tensor) -> Any:
    weights = others(model, requires_grad=False) | {"embedding.weight": model.embedding.weight}
    logits: Any = functional_call(model, weights, (ids,))
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def functional_call_with_results(model: Model, ids: Tensor) -> Any:
    weights = {name: w * 2 for name, w in model.named_parameters()}
    logits: Any = functional_call(model, weights, (ids,))
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def functional_call_with_another_bias(model: Model, ids: Tensor) -> Any:
    bias = torch.linspace(-1, 1, NUM_CLASSES, requires_grad=True)
    logits: Any = functional_call(model, {"head.bias": bias}, (ids,))
    (loss := loss_of(logits, ids)).backward()
    return loss, bias.grad, logits.argmax(-1)


@functional_transform
def functional_gradients(model: Model, ids: Tensor) -> Any:
    def compute(weights: dict[str, Tensor]) -> Tensor:
        logits: Any = functional_call(model, weights, (ids,))
        return loss_of(logits, ids)

    return torch.func.grad_and_value(compute)(others(model, requires_grad=False))


@functional_transform
def functional_gradients_of_each_row(model: Model, ids: Tensor) -> Any:
    def compute(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        logits: Any = functional_call(model, weights, (row[None],))
        return loss_of(logits, row)

    return torch.func.vmap(torch.func.grad(compute), (None, 0))(others(model, requires_grad=False), ids)


@functional_transform
def forward_mode(model: Model, ids: Tensor) -> Any:
    def compute(bias: Tensor) -> Tensor:
        logits: Any = functional_call(model, {"layer.bias": bias}, (ids,))
        return loss_of(logits, ids)

    return torch.func.jvp(compute, (model.layer.bias.detach(),), (torch.ones(SIZE),))


@use
def weight_replaced(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    model.head.weight = nn.Parameter(torch.zeros(NUM_CLASSES, SIZE))
    model.head.bias = nn.Parameter(torch.ones(NUM_CLASSES))
    (loss := loss_of(logits, ids)).backward()
    return loss, logits.argmax(-1)


@use
def head_replaced(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    model.head = nn.Linear(SIZE, NUM_CLASSES)
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def bias_removed(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    model.head.bias = None  # type: ignore[assignment]
    (loss := loss_of(logits, ids)).backward()
    return loss, logits.sum()


@use
def weight_frozen(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    model.head.requires_grad_(False)
    (loss := loss_of(logits, ids)).backward()
    return loss


@use
def weight_frozen_and_losses_by_row(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    model.head.weight.requires_grad_(False)
    (losses := loss_of(logits, ids, reduction="none")).mean().backward()
    return losses


@use
def weight_frozen_and_all_logits(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    model.requires_grad_(False)
    (loss := logits.square().mean()).backward()
    return loss


@use
def weight_unfrozen(model: Model, ids: Tensor) -> Any:
    model.head.requires_grad_(False)
    logits = model(ids)
    model.head.requires_grad_(True)
    (loss := loss_of(logits, ids) + logits.square().mean()).backward()
    return loss


@use
def frozen_head(model: Model, ids: Tensor) -> Any:
    model.head.requires_grad_(False)
    (loss := loss_of(model(ids), ids)).backward()
    return loss


@use
def hidden_states_frozen(model: Model, ids: Tensor) -> Any:
    hidden = model.hidden(ids).detach().requires_grad_()
    logits = model.head(hidden)
    hidden.requires_grad_(False)
    (loss := loss_of(logits, ids)).backward()
    return loss, hidden.grad


@refused("its weight changed")
def weight_written(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    with torch.no_grad():
        model.head.weight.mul_(2.0)
    return loss_of(logits, ids)


@refused("its weight changed")
def weight_written_through_data(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    model.head.weight.data[7] += 1.0
    return loss_of(logits, ids)


@refused("its bias changed")
def bias_written_through_data(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    model.head.bias.data.neg_()
    return loss_of(logits, ids, reduction="none")


@refused("the input of the layer changed")
def hidden_states_written_through_data(model: Model, ids: Tensor) -> Any:
    hidden = model.hidden(ids)
    logits = model.head(hidden)
    hidden.data[1] = 0.0
    return loss_of(logits, ids)


@refused("its weight changed")
def data_of_the_weight_replaced(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    model.head.weight.data = model.head.weight.data * 2
    return loss_of(logits, ids)


@refused("its weight changed")
def model_converted(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    model.double()
    return loss_of(logits, ids)


@refused("its weight changed")
def read_after_a_step(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    loss_of(logits, ids).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return logits.argmax(-1)


@refused("its weight changed")
def read_after_a_step_through_data(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    loss_of(logits, ids).backward()
    for p in model.parameters():
        assert p.grad is not None
        p.data -= 0.1 * p.grad
    return logits.argmax(-1)


@use
def read_before_and_after_a_step(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    (loss := loss_of(logits, ids)).backward()
    first = logits.argmax(-1)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss, first, logits.softmax(-1)


@use
def bias_given_by_hand(model: Model, ids: Tensor) -> Any:
    bias = torch.ones(NUM_CLASSES, requires_grad=True)
    model.head.forward = lambda x: functional.linear(x, model.head.weight, bias)  # type: ignore[method-assign]
    (loss := loss_of(model(ids), ids)).backward()
    del model.head.forward
    return loss, bias.grad


@use
def bias_given_by_name(model: Model, ids: Tensor) -> Any:
    model.head.forward = lambda x: functional.linear(x, model.head.weight, bias=model.head.bias)  # type: ignore[method-assign]
    (loss := loss_of(model(ids), ids)).backward()
    del model.head.forward
    return loss


@use
def autocast_around_the_loss_alone(model: Model, ids: Tensor) -> Any:
    logits = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(logits, ids)
        also = logits.argmax(-1)
    loss.backward()
    return loss, also


@use
def a_weight_in_two_passes(model: Model, ids: Tensor) -> Any:
    first = loss_of(model(ids), ids)
    first.backward()
    with torch.no_grad():
        model.head.weight.mul_(0.5)
    (second := loss_of(model(ids), ids)).backward()
    return first, second
