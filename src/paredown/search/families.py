"""Tasks of one family of models, as a kind of their own beside all tasks.

The kind of a family has the mean of its tasks, drawn to that of all by as much as OF_ALL tasks weigh, and their spread, drawn to that of
all. A new task is of it with probability n / (n + DOUBT), n being the number of its tasks, else as all tasks are; what is measured decides
from then on. A family that no earlier task has starts from the one that shares most traits with it, with more doubt.

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
TRAITS = MappingProxyType(
    {
        "cnn": {"convolutions", "pictures", "batch norms"},
        "vit": {"attention", "layer norms", "residuals", "pictures"},
        "gpt": {"attention", "layer norms", "residuals", "tokens"},
        "bert": {"attention", "layer norms", "residuals", "tokens"},
        "unet": {"convolutions", "pictures", "group norms"},
        "mlp": {"linear layers"},
        "rnn": {"tokens", "linear layers"},
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


def with_family(mixture: Mixture, sums: Sums, is_of: NDArray[np.bool_], *, is_own: bool = True) -> Mixture:
    """The mixture and, last, the kind of the tasks `is_of`; without it where that are all tasks, or none."""
    count = int(is_of.sum())
    if not count or count == len(is_of):
        return mixture
    share = count / (count + (DOUBT if is_own else OTHER_DOUBT))
    mean, spread = _family(mixture, sums.rows(is_of), count)
    return Mixture(
        np.append(mixture.shares * (1 - share), share),
        np.concatenate([mixture.means, mean[None]]),
        np.concatenate([mixture.spreads, spread[None]]),
        np.concatenate([mixture.noise, (mixture.shares @ mixture.noise)[None]]),
    )


def _family(mixture: Mixture, sums: Sums, count: int) -> tuple[Array, Array]:
    """Mean and spread of the family's tasks; the spread has the doubt about the mean in it."""
    nobody = Sums(*(np.zeros((1, mixture.means.shape[1])) for _ in range(3)))
    middle, whole = (part[0] for part in mixture.given(nobody).moments())
    means, spreads = mixture.given(sums).moments()
    mean = (means.sum(axis=0) + OF_ALL * middle) / (count + OF_ALL)
    apart = means - mean
    spread = (apart.T @ apart + spreads.sum(axis=0) + STRENGTH * whole) / (count + STRENGTH)
    return mean, spread * (1 + 1 / (count + OF_ALL))
