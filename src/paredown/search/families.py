"""Kinds of tasks beside those that EM finds: the tasks of one family of models, and tasks like none before.

The kind of a family has the mean of its tasks, drawn to that of all by as much as OF_ALL tasks weigh, and their spread, drawn to that of
all. A new task is of it with probability n / (n + DOUBT), n being the number of its tasks, else as all tasks are; what is measured decides
from then on. A family that no earlier task has starts from the one that shares most traits with it, with more doubt.

A last kind is for tasks like none before: plans of any error, far less tied to each other, and noisier runs. It is unlikely, until what is
measured is more unlikely under all others; then measurements speak for themselves.

>>> nearest("vit", ["cnn", "gpt"]), nearest("cnn", ["cnn", "gpt"]), nearest("unknown", ["cnn"])
('gpt', 'cnn', '')
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from paredown.search.mixture import STRENGTH, Mixture, Sums

Array = NDArray[np.float64]
OF_ALL = 2.0
DOUBT, OTHER_DOUBT = 4.0, 12.0  # of one's own family, of another one
STRANGE = 0.03  # the share of tasks like none before
TOGETHER, APART, NOISIER = (
    0.25,
    0.12,
    4.0,
)  # deviations of such a task and of its plans, in parts of a blind guess; of runs, times others'
TRAITS = MappingProxyType(
    {
        "cnn": {"convolutions", "pictures", "batch norms"},
        "vit": {"attention", "layer norms", "residuals", "pictures"},
        "gpt": {"attention", "layer norms", "residuals", "tokens"},
        "bert": {"attention", "layer norms", "residuals", "tokens"},
        "unet": {"convolutions", "pictures", "group norms"},
        "mlp": {"linear layers"},
        "lstm": {"tokens", "linear layers"},
    }
)


def nearest(family: str, known: Sequence[str]) -> str:
    """The known family that shares most traits with this one; "" where none shares any."""
    if family in known:
        return family
    own = TRAITS.get(family, set())
    shared = {other: len(own & TRAITS.get(other, set())) for other in dict.fromkeys(known)}
    best = max(shared, key=lambda other: shared[other], default="")
    return best if best and shared[best] else ""


def with_strangers(mixture: Mixture) -> Mixture:
    """The mixture and, last, the kind of tasks like none before."""
    mean = mixture.shares @ mixture.means
    spread = TOGETHER**2 + APART**2 * np.eye(len(mean))
    noise = np.full(len(mean), NOISIER**2 * float((mixture.shares @ mixture.noise).mean()))
    return _joined(mixture, STRANGE, mean, spread, noise)


def with_noises(mixture: Mixture, ratios: Array) -> Mixture:
    """Each kind once for each of these ratios of its noise, variances: how noisy runs of a task are is no more known than its kind."""
    shares = np.repeat(mixture.shares, len(ratios)) / len(ratios)
    noise = (mixture.noise[:, None] * ratios[:, None]).reshape(len(shares), -1)
    means, spreads = (np.repeat(part, len(ratios), axis=0) for part in (mixture.means, mixture.spreads))
    return Mixture(shares, means, spreads, noise)


def with_family(mixture: Mixture, sums: Sums, is_of: NDArray[np.bool_], *, is_own: bool = True) -> Mixture:
    """The mixture and, last, the kind of the tasks `is_of`; without it where that are all tasks, or none."""
    count = int(is_of.sum())
    if not count or count == len(is_of):
        return mixture
    share = count / (count + (DOUBT if is_own else OTHER_DOUBT))
    return _joined(mixture, share, *_family(mixture, sums.rows(is_of), count), mixture.shares @ mixture.noise)


def _joined(mixture: Mixture, share: float, mean: Array, spread: Array, noise: Array) -> Mixture:
    """With a kind more."""
    return Mixture(
        np.append(mixture.shares * (1 - share), share),
        np.concatenate([mixture.means, mean[None]]),
        np.concatenate([mixture.spreads, spread[None]]),
        np.concatenate([mixture.noise, noise[None]]),
    )


def _family(mixture: Mixture, sums: Sums, count: int) -> tuple[Array, Array]:
    """Mean and spread of the family's tasks; the spread has the doubt about the mean in it."""
    nobody = Sums(*(np.zeros((1, mixture.means.shape[1])) for _ in range(3)))
    middle, whole = (part[0] for part in mixture.given(nobody).moments())
    means, spreads = mixture.given(sums).moments()
    mean = (means.sum(axis=0) + OF_ALL * middle) / (count + OF_ALL)
    apart = means - mean
    strength = max(STRENGTH, float(len(mean) - count))
    spread = (apart.T @ apart + spreads.sum(axis=0) + strength * whole) / (count + strength)
    return mean, spread * (1 + 1 / (count + OF_ALL))
