"""The exceptions of paredown: every one is a `ParedownError`, and says what, where, the numbers and what to do next."""

LONGEST = 2000  # letters of a message: what it quotes may be of any length


class ParedownError(Exception):
    """Anything that paredown itself refuses."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


class FormatError(ParedownError, ValueError):
    """A format or an element that is misspelled or cannot exist."""


class CodecError(ParedownError, ValueError):
    """A tensor that cannot be stored the way it was asked for."""


class PlanError(ParedownError, ValueError):
    """A plan that says something impossible, or that nothing in the model answers to."""


class TraceError(ParedownError, RuntimeError):
    """A step that cannot be followed without running it."""


class ApplyError(ParedownError, RuntimeError):
    """A plan that cannot be put onto this model, here and now."""


class VerificationError(ParedownError, RuntimeError):
    """Gradients under a plan that are not those of the unmodified model."""


class BudgetError(ParedownError, ValueError):
    """A size that is misspelled, or a budget that nothing fits; `smallest_bytes`: what would do, where that is known."""

    smallest_bytes: int | None = None


class OptimError(ParedownError, RuntimeError):
    """An optimizer that is asked for what it cannot do, or a state that does not belong to it."""


class SweepError(ParedownError, ValueError):
    """A sweep that is described wrongly, or that cannot go on."""


class StoreError(ParedownError, RuntimeError):
    """A store of trials that cannot be opened, read or written."""


class ReportError(ParedownError, ValueError):
    """A record that cannot be read, or a page that cannot be made or served."""


class TaskError(ParedownError, ValueError):
    """A task that cannot be found, or whose model, data and settings do not fit together."""


class PriorError(ParedownError, ValueError):
    """A file of earlier tasks that cannot be read or made, or a name that none has."""
